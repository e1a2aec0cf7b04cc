"""How large the project is: lines by folder, modules, options, settings, import contracts and wire versions.

`make count` prints it as a table. Lines are those of files that git tracks.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

from embedctl.cli import main as cli
from embedctl_config import wire
from embedctl_config.settings import SETTINGS

ROOT = Path(__file__).parents[2]
PRODUCT = ("config", "producer", "gateway", "workers")
#: How a page begins that `make docs` writes from the source.
GENERATED = b"<!-- Written by `make docs`"


def main() -> None:
    """Print the table."""
    print("| | |\n| --- | ---: |")
    for name, count in rows():
        print(f"| {name} | {count:,} |")


def rows() -> Iterator[tuple[str, int]]:
    """What is counted, and how much of it there is."""
    lines = {folder: _lines(folder, "*.py") for folder in (*PRODUCT, "benchmarks", "tests")}
    for folder, count in lines.items():
        yield f"`{folder}`, lines of Python", count
    yield "product, lines of Python", sum(lines[folder] for folder in PRODUCT)
    for name, patterns in (("Lua", ("*.lua",)), ("C", ("*.c", "*.h")), ("SVG", ("*.svg",))):
        yield f"lines of {name}", _lines(".", *patterns)
    yield "lines of Markdown, without generated pages", _lines(".", "*.md")
    yield "modules of the product", sum(len(_files(folder, "*.py")) for folder in PRODUCT)
    yield "modules beside the rooms of `producer`", _flat("producer/embedctl")
    yield "modules beside the rooms of `gateway`", _flat("gateway/embedctl_gateway")
    for name in ("run", "submit", "fetch"):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield f"options of `{name}`", sum(isinstance(each, click.Option) for each in command.params)
    yield "settings", len(SETTINGS)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    yield "import contracts, of layers", sum(each["type"] == "layers" for each in contracts)
    yield "wire versions", wire.VERSION


def _files(folder: str, *patterns: str) -> list[Path]:
    where = [f":(glob){folder}/**/{pattern}" for pattern in patterns]
    found = subprocess.run(["git", "ls-files", "--", *where], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in found.stdout.splitlines()]


def _lines(folder: str, *patterns: str) -> int:
    contents = (file.read_bytes() for file in _files(folder, *patterns))
    return sum(content.count(b"\n") for content in contents if not content.startswith(GENERATED))


def _flat(folder: str) -> int:
    return sum(file.parent == ROOT / folder for file in _files(folder, "*.py"))


if __name__ == "__main__":
    main()

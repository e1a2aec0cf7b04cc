"""Packages that only some tests need."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import venv
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def need(name: str) -> Any:
    """A module; if it is not installed, the test is skipped, and fails in CI."""
    try:
        return importlib.import_module(name)
    except ImportError:
        reason = f"{name} is not installed"
        return (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def packages_of(requirement: Requirement) -> set[str]:
    """The distribution of a requirement, and all that it brings here, by their canonical names."""
    found, waiting = set[tuple[str, str]](), [requirement]
    while waiting:
        each = waiting.pop()
        for extra in ("", *each.extras):
            key = (canonicalize_name(each.name), extra)
            if key not in found:
                found.add(key)
                brought = map(Requirement, metadata.requires(each.name) or ())
                waiting += [other for other in brought if not other.marker or other.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def new_environment(folder: Path, *names: str, with_pip: bool = True) -> Path:
    """Make an environment with pip, or without, and some packages of this one; return its Python.

    venv itself would unpack and compile a pip for each environment: 5 s.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/*/site-packages")
    for name in names:
        put_into(name, packages)
    if not with_pip:
        return python
    put_into("pip", packages)
    script = folder / "bin" / "pip"
    script.write_text(f"#!{python}\nimport runpy\nrunpy.run_module('pip', run_name='__main__')\n")
    script.chmod(0o755)
    return python


def put_into(name: str, packages: Path) -> None:
    """Put a package of this environment into another one's `site-packages`, where pip finds it installed.

    Its files are links if they can be, for a package as large as torch; each can be removed there without loss here.
    What this environment's Python compiled of them goes with them.
    """
    for file in metadata.distribution(name).files or []:
        if ".." in file.parts:
            continue
        source, target = Path(str(file.locate())), packages / file
        _link(source, target)
        if source.suffix == ".py":
            _link(Path(cache_from_source(source)), Path(cache_from_source(target)))


def _link(source: Path, target: Path) -> None:
    if target.exists() or not source.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


if __name__ == "__main__":
    new_environment(Path(sys.argv[-1]), with_pip="--without-pip" not in sys.argv)

"""Packages that only some tests need."""

from __future__ import annotations

import importlib
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest


def need(name: str) -> Any:
    """A module; if it is not installed, the test is skipped, and fails in CI."""
    try:
        return importlib.import_module(name)
    except ImportError:
        reason = f"{name} is not installed"
        return (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def put_into(name: str, packages: Path) -> None:
    """Put a package of this environment into another one's `site-packages`, where pip finds it installed.

    Its files are links if they can be, for a package as large as torch; each can be removed there without loss here.
    """
    for file in metadata.distribution(name).files or []:
        target = packages / file
        if ".." in file.parts or not (source := Path(str(file.locate()))).is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copyfile(source, target)

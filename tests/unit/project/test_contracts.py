"""The contracts of imports in pyproject.toml hold what they say: `make lint` runs them, and here they fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "config/embedctl_config",
    "producer/embedctl",
    "gateway/embedctl_gateway",
    "workers/embedctl_workers",
    "benchmarks/embedctl_bench",
)
#: A file, what is added to it, and how the names begin of the contracts that it breaks.
FAULTS = {
    "producer/embedctl/common/rates.py": ("import embedctl.cli", "Inside the producer"),
    "producer/embedctl/corpus/rows.py": ("import embedctl_workers", "Imports run"),
    "producer/embedctl/store/lease.py": ("from embedctl.store import upkeep", "Inside the store"),
    "producer/embedctl/destinations/npy.py": ("from embedctl.destinations import jsonl", "Inside the destinations"),
    "gateway/embedctl_gateway/http/ranges.py": ("from embedctl_gateway.calls import openai", "Inside the gateway"),
    "workers/embedctl_workers/arrays/tokens.py": ("import embedctl_workers.serving", "Inside the workers"),
    "config/embedctl_config/tenants.py": ("from embedctl_config import wire", "Inside config"),
    "benchmarks/embedctl_bench/texts.py": ("import embedctl_bench.grid", "Inside the benchmarks"),
    "producer/embedctl/jobs/offered.py": ("from embedctl.jobs import enqueue", "No circles"),
}
ROOMS = ("config/embedctl_config", "gateway/embedctl_gateway", "producer/embedctl", "producer/embedctl/store")
IMPORTED = re.compile(r"^ *from embedctl\w*(?:\.\w+)* import (?:\(([^)]*)\)|([^(\n]*)$)", re.MULTILINE)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with the product's Python and its pyproject.toml, which a test may spoil."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def linted(folder: Path) -> str:
    paths = os.pathsep.join(str(folder / Path(package).parent) for package in PACKAGES)
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "300"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


def test_each_contract_fails_for_an_import_up_the_rooms(copied: Path) -> None:
    for file, (line, _) in FAULTS.items():
        with (copied / file).open("a", encoding="utf-8") as source:
            source.write(f"\n{line}\n")
    broken = re.findall(r"^(.*) BROKEN$", linted(copied), re.MULTILINE)
    for file, (line, contract) in FAULTS.items():
        assert any(name.startswith(contract) for name in broken), f"{line} in {file}: {broken}"


def test_a_room_that_no_contract_names_is_refused(copied: Path) -> None:
    for folder in ROOMS:
        (copied / folder / "attic.py").touch()
    said = linted(copied)
    for folder in ROOMS:
        assert ".".join((*Path(folder).parts[1:], "attic")) in said


def test_no_module_imports_a_private_name_of_another() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for names in IMPORTED.findall(file.read_text(encoding="utf-8"))
        for name in re.findall(r"\w+", " ".join(names))
        if name.startswith("_") and not name.startswith("__")
    }
    assert found == set()

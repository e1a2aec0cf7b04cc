"""What import-linter does not see: imports of private names, and imports between modules of tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
IMPORTED = re.compile(r"^ *from embedctl\w*(?:\.\w+)* import (?:\(([^)]*)\)|([^(\n]*)$)", re.MULTILINE)
#: What tests share stands in tests/support, or in a program that they test; never in another test.
OF_ONE_TEST = re.compile(
    r"^ *(?:from|import) (?:\.|tests\.(?!support\b)[\w.]*(?: import .*)?\b(?:test_|conftest)).*", re.MULTILINE
)


def test_no_module_imports_a_private_name_of_another() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for package in ("config", "producer", "gateway", "workers", "benchmarks/embedctl_bench")
        for file in (ROOT / package).rglob("*.py")
        for names in IMPORTED.findall(file.read_text(encoding="utf-8"))
        for name in re.findall(r"\w+", " ".join(names))
        if name.startswith("_") and not name.startswith("__")
    }
    assert found == set()


def test_no_module_imports_a_test_or_a_conftest() -> None:
    files = {file: file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")}
    assert {f"{file.name}: {line}" for file, text in files.items() for line in OF_ONE_TEST.findall(text)} == set()

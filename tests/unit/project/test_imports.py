"""What tests share stands in tests/support, or in a program that they test; never in another test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]
#: What stands in each file with such an import, and in few others: to parse all of them takes long.
SUSPECT = re.compile(r"^\s*(?:from|import) (?:.*\b(?:test_|conftest)|\.|tests[\w.]* import \()", re.MULTILINE)


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, at its top or anywhere else; of `from a import b` both a and a.b."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if SUSPECT.search(text) else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def of_one_test(module: str) -> bool:
    """Whether pytest collects a module, or it is a conftest."""
    *packages, name = module.split(".")
    return (name.startswith("test_") or name == "conftest") and TESTS.parent.joinpath(*packages, f"{name}.py").is_file()


def test_no_module_imports_a_test_or_a_conftest() -> None:
    wrong = {
        f"{path.relative_to(TESTS.parent)} imports {module}"
        for path in TESTS.rglob("*.py")
        for module in imported(path)
        if module.startswith(".") or of_one_test(module)
    }
    assert wrong == set()

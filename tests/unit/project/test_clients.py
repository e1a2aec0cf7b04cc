"""The table of clients in docs/gateway.md names what the tests marked `client(NAME, WHAT)` do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def marked() -> Iterator[tuple[str, ...]]:
    for path in (ROOT / "tests" / "e2e").glob("test_*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "pytest.mark.client(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.client":
                yield tuple(map(ast.literal_eval, node.args))


def test_the_table_names_what_every_marked_test_does() -> None:
    section = (ROOT / "docs" / "gateway.md").read_text("utf-8").partition("\n## Clients\n")[2].partition("\n## ")[0]
    rows = [tuple(map(str.strip, line.strip("|").split("|"))) for line in section.splitlines() if line[:1] == "|"]
    assert sorted((client, done) for client, _, done in rows[2:]) == sorted(marked())

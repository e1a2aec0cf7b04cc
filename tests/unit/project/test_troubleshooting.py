"""The messages that docs/troubleshooting.md quotes are those of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from embedctl_config.wire import ErrorCode

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("producer/embedctl", "gateway/embedctl_gateway", "workers/embedctl_workers", "config/embedctl_config")
#: What differs from one message to the next, on the page.
HOLE = "…"
#: The same in the source.
FORMAT = re.compile(r"%[.\d]*[a-z]")


def rows() -> Iterator[list[str]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def quoted() -> list[str]:
    """What stands in code in the first column, but for codes, commands, and values of what `status` shows in bold."""
    spans = [span for symptom, *_ in rows() for span in re.findall(r"(\*\* )?`([^`]+)`", symptom)]
    return [text for bold, text in spans if not bold and " " in text and not text.startswith("embedctl ")]


def messages() -> list[str]:
    """Every string of the source, with a hole for each value in it."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(FORMAT.sub(HOLE, node.value))
    return found


def says(message: str, quote: str) -> bool:
    """Whether the parts of a quotation between its holes stand in a message one after the other."""
    at = 0
    for part in filter(None, quote.split(HOLE)):
        at = message.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_the_quoted_messages_are_those_of_the_source() -> None:
    found, quotes = messages(), set(quoted())
    assert [quote for quote in quotes if not any(says(message, quote) for message in found)] == []
    assert len(quotes) >= 30


def test_every_code_of_a_record_has_a_row() -> None:
    assert {str(code) for code in ErrorCode} == {
        cells[0].strip("`") for cells in rows() if re.fullmatch(r"`[a-z_0-9]+`", cells[0])
    }

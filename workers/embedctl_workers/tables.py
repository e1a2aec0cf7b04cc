"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(rows: Sequence[Sequence[str]], figures: Container[int] = ()) -> list[str]:
    """The lines of a table; these columns are aligned to the right, the others to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.rjust if at in figures else str.ljust for at in range(len(widths))]
    return [
        "  ".join(to(cell, width) for to, cell, width in zip(align, row, widths, strict=True)).rstrip() for row in rows
    ]

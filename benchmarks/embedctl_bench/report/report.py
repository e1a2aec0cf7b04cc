"""A report: what was measured, on which machine, and how that compares with what was published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

#: What stands for a value that there is none of.
NONE = "–"
#: Marks of a row of a table, and the words that they are shown with.
MARKS = {"_noisy": "noisy", "_published": "other hardware"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        key: of the value in each row, and the heading in CSV.
        digits: after the point; None for values that are shown as they are.
    """

    key: str
    label: str
    unit: str = ""
    digits: int | None = None

    @property
    def heading(self) -> str:
        """The label, with the unit in brackets."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def show(self, row: Mapping[str, object]) -> str:
        """The row's value in this column, as people read it."""
        value = row.get(self.key)
        if value is None or value != value:
            return NONE
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, int | float) and self.digits is not None:
            return f"{value:,.{self.digits}f}"
        return str(value)


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        name: of its CSV file; letters, digits and dashes.
        rows: values by column key. True under `_bold` prints a row in bold, under `_noisy` says that its rounds differ
            by too much, under `_published` that it was measured elsewhere, by others.
        note: stands under the table. In this and all other text, `**bold**` and code in backticks are understood.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, object]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one colour of bars; `low` and `high` are the least and the largest of several rounds."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture.

    Attributes:
        name: of its file; letters, digits and dashes.
        kind: `bars` lie, one group for each of `ticks` from the top down; a series' `x` are the numbers of its groups.
        log_y: of lines, where their values span a decade at least; else the axis begins at zero.
        ticks: names of the groups of bars; of lines, names of the values of `x` in their order.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["line", "bars"] = "line"
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """What a publication says, beside what this run says; `why` explains where it is not met."""

    what: str
    published: str
    ours: str
    met: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All that a benchmark found.

    Attributes:
        name: of its files.
        command: what makes this report again.
        workload: what was run, in a paragraph.
        machine: facts by name, in the order in which they are shown; a nested mapping is shown in one line.
        notes: a paragraph each.
    """

    name: str
    title: str
    command: str
    workload: str
    machine: Mapping[str, object]
    tables: Sequence[Table]
    plots: Sequence[Plot]
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()

"""A report: what was measured, on which machine, and how that compares with what was published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

#: Shown for a missing value.
NONE = "–"
#: Marks of a table's row → the words that show them.
MARKS = {"_noisy": "noisy", "_published": "other hardware"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        key: of the value in each row, and the heading in CSV.
        digits: after the point; None shows values unchanged.
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
        rows: values by column key. True under `_bold` prints a row in bold; under `_noisy`, its rounds differ too much;
            under `_published`, the publisher measured it on other hardware.
        note: stands under the table. This and all other texts may hold `**bold**` and code in backticks.
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
        kind: `bars` are horizontal, one group for each of `ticks` from the top down; a series' `x` are the numbers of
            its groups.
        log_y: a logarithmic axis for lines whose values span at least a decade; else the axis begins at zero.
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
    """A published figure beside that of this run; `why` explains why it is not met."""

    what: str
    published: str
    ours: str
    met: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All results of a benchmark.

    Attributes:
        name: of its files.
        command: the command that makes this report again.
        workload: a paragraph on what was run.
        machine: facts by name, in the order shown; a nested mapping takes one line.
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

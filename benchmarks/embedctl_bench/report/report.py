"""A report: what was measured, on which machine, and how that compares with what was published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Shown for a missing value.
NONE = "–"
#: Marks of a table's row → the words that show them.
MARKS = {"_noisy": "noisy", "_published": "other hardware"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        key: of the value in each row.
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
        name: for programs; letters, digits and dashes.
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
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()

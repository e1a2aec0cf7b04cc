"""An earlier output of ours, whose vectors are copied where a text is still the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embedctl.changes.spool import Copied
from embedctl.destinations.about import About
from embedctl.destinations.numbers import Numbers
from embedctl.digests import Digests
from embedctl_config.errors import OutputError, SettingsError

#: Rows of an earlier output.
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EarlierRows:
    """Consecutive rows of an earlier output.

    Attributes:
        digests: uint8, rows × 32; zeros for a record without a text.
        usable: whether each row has a vector.
    """

    digests: Digests
    ids: Sequence[str | None]
    usable: npt.NDArray[np.bool_]


class Earlier(ABC):
    """The rows of an earlier output, which stays the same while it is open, even if its name is given to another file.

    Attributes:
        name: in messages.
        about: what its vectors are.
        rows: how many there are.
        dim: dimensions of a vector.
    """

    name: str
    about: About
    rows: int
    dim: int

    @abstractmethod
    def read(self) -> Iterator[EarlierRows]:
        """All rows in their order, some thousand at a time.

        Raises:
            OutputError: the file is damaged.
        """

    @abstractmethod
    def take(self, rows: Rows) -> Copied:
        """The vectors of these rows, with the digests that are stored beside them.

        Raises:
            OutputError: the file is damaged.
        """

    def prepare(self, rows: Rows, scratch: Path) -> None:  # noqa: B027  (what need not be prepared is ready)
        """Get ready to take many rows in this order.

        Args:
            rows: those below 0 are passed over.
            scratch: a folder with room for the vectors.
        """


def no_digests(name: str) -> OutputError:
    """The error for an output that does not say which texts it is of."""
    return OutputError(
        f"{name} has no digests of its texts, so nothing tells what has changed: make it once with --digests, or give "
        "--force to encode everything"
    )


def check_numbers(name: str, stored: Numbers, numbers: Numbers | None) -> None:
    """Check that vectors can be copied as they are.

    Raises:
        SettingsError: they can't.
    """
    wanted = numbers.kind.value if numbers is not None else "float32"
    if stored.kind.value not in ("float32", "float16"):
        raise SettingsError(
            f"{name} stores {stored.kind.value}, from which vectors can't be copied exactly: --sync takes float32 and "
            "float16"
        )
    if stored.kind.value != wanted:
        raise SettingsError(
            f"{name} stores {stored.kind.value}, and the new output is to store {wanted}: give --output-type "
            f"{stored.kind.value}, or --force to encode everything"
        )

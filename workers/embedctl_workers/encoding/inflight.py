"""The batches of one chunk on a device, some of which may be under way at once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from embedctl_config.errors import DeviceLost, EmbedctlError, WorkerSick
from embedctl_config.wire import ErrorCode
from embedctl_workers.arrays.tokens import Rows, Vectors
from embedctl_workers.backends.base import Backend, is_out_of_memory
from embedctl_workers.encoding.prepared import Prepared
from embedctl_workers.redaction import first_line

log = logging.getLogger(__name__)

#: What ends a worker, and is no row's failure.
OF_THE_WORKER = (DeviceLost, WorkerSick)


class Batches:
    """The batches of a chunk on a backend: begun one after the other, and finished in that order.

    Args:
        into: float32, rows of tokens × dim.
        bad: gets the rows that have no vector, and why.
        check: raises where it is the worker that can't encode, and not a row that can't be encoded.

    Attributes:
        failed: batches whose rows are to be told apart, and what they failed with.
        elsewhere: rows of `bad` that another process may have what it takes for.
        too_large: rows × longest row of batches that the device had no memory for, though for each of their rows.
    """

    def __init__(
        self,
        backend: Backend,
        prepared: Prepared,
        into: Vectors,
        bad: dict[int, tuple[ErrorCode, str]],
        on_batch: Callable[[int], None] | None,
        check: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._prepared = prepared
        self._into = into
        self._bad = bad
        self._on_batch = on_batch
        self._check = check
        self._checked = False
        self._begun: deque[tuple[Rows, Any]] = deque()
        self.failed: list[tuple[Rows, Exception]] = []
        self.elsewhere: set[int] = set()
        self.too_large: list[int] = []

    def begin(self, rows: Rows) -> None:
        """Begin a batch, and finish those before it that the backend does not want to run beside it."""
        try:
            self._begun.append((rows, self._backend.forward(self._prepared.tokens_of(rows), rows)))
        except OF_THE_WORKER:
            raise
        except Exception as error:  # noqa: BLE001  (whatever one row does to the backend is that record's error)
            self.failed.append((rows, error))
        self.finish(self._backend.ahead)
        self.split_failed()

    def finish(self, but: int = 0) -> None:
        """Wait for all that was begun, but for so many."""
        while len(self._begun) > but:
            rows, output = self._begun.popleft()
            try:
                self._store(rows, output)
            except OF_THE_WORKER:
                raise
            except Exception as error:  # noqa: BLE001  (as above)
                self.failed.append((rows, error))
            else:
                self._told(rows)

    def split_failed(self) -> None:
        """Finish all that was begun, and halve what failed until the rows that fail stand alone."""
        if not self.failed:
            return
        self.finish()
        failed, self.failed = self.failed, []
        for rows, error in failed:
            self._split(rows, error)
            self._told(rows)

    def again(self, row: int) -> None:
        """Encode a row that has no vector once more, alone. Nothing else may be under way."""
        rows = np.array([row], np.int64)
        del self._bad[row]
        self.elsewhere.discard(row)
        try:
            self._store(rows, self._backend.forward(self._prepared.tokens_of(rows), rows))
        except OF_THE_WORKER:
            raise
        except Exception as error:  # noqa: BLE001  (as above)
            self._blame(row, error)
        self._told(rows)

    def _split(self, rows: Rows, error: Exception) -> None:
        if len(rows) == 1:
            self._blame(int(rows[0]), error)
            if not self._checked:  # at once: a worker that can encode nothing need not find that out row by row
                self._checked = True
                self._check()
            return
        log.warning(
            "a batch of %d rows failed (%s): halving it", len(rows), type(error).__name__, extra=self._prepared.about
        )
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            try:
                self._store(half, self._backend.forward(self._prepared.tokens_of(half), half))
            except OF_THE_WORKER:
                raise
            except Exception as again:  # noqa: BLE001  (as above)
                self._split(half, again)
        code = ErrorCode.OUT_OF_MEMORY
        if is_out_of_memory(error) and not any(self._bad.get(row, ("",))[0] is code for row in rows.tolist()):
            self.too_large.append(int(self._prepared.tokens.lengths[rows].max()) * len(rows))

    def _store(self, rows: Rows, output: Any) -> None:
        prepared = self._prepared
        self._into[rows] = self._backend.finish(output, normalize=prepared.normalize and not prepared.raw)
        for row in rows[~np.isfinite(self._into[rows]).all(axis=1)].tolist():
            self._bad[row] = (ErrorCode.NON_FINITE, "the model's output holds infinity or NaN")
            self._into[row] = np.nan

    def _blame(self, row: int, error: Exception) -> None:
        code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.ENCODE_ERROR
        self._bad[row] = (code, f"the backend failed: {first_line(error)}")
        if is_of_surroundings(error):
            self.elsewhere.add(row)

    def _told(self, rows: Rows) -> None:
        if self._on_batch is not None:
            self._on_batch(int(self._prepared.tokens.lengths[rows].sum()))


def is_of_surroundings(error: Exception) -> bool:
    """Whether something failed for want of what another process may have: memory, files, libraries, settings."""
    return is_out_of_memory(error) or isinstance(error, OSError | ImportError | EmbedctlError)

"""The batches of one chunk on a device; several may be in flight at once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from embedctl_config.errors import DeviceLost, EmbedctlError, WorkerSick
from embedctl_config.wire import ErrorCode
from embedctl_workers.arrays.batching import size_of
from embedctl_workers.arrays.outputs import finite, nothing
from embedctl_workers.arrays.tokens import Found, Rows
from embedctl_workers.backends.base import Backend, Widens, is_out_of_memory
from embedctl_workers.encoding.prepared import Prepared
from embedctl_workers.redaction import first_line

log = logging.getLogger(__name__)

#: Errors that end the worker; no row is to blame for them.
OF_THE_WORKER = (DeviceLost, WorkerSick)


class Batches:
    """The batches of a chunk on a backend: begun one after the other, and finished in that order.

    Args:
        on_batch: called after each batch with its tokens.
        check: raises if the worker can't encode, so that no row is to blame.
    """

    def __init__(
        self,
        backend: Backend,
        prepared: Prepared,
        on_batch: Callable[[int], None],
        check: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._prepared = prepared
        self._on_batch = on_batch
        self._check = check
        self._checked = False
        self._begun: deque[tuple[Rows, Any]] = deque()
        outputs = prepared.tokens.outputs
        #: float32, rows of tokens × dim, or cells; NaN or None in a row that has no vector
        self.vectors: Found = nothing(len(prepared.tokens.lengths), outputs, backend.dim)
        self._nothing = nothing(1, outputs, backend.dim)[0]
        #: rows without a vector, and why they have none
        self.bad: dict[int, tuple[ErrorCode, str]] = {}
        #: batches in which the rows to blame are not known yet, and their errors
        self.failed: list[tuple[Rows, Exception]] = []
        #: rows of `bad` that failed because this process lacks something, such as memory
        self.elsewhere: set[int] = set()
        #: sizes of batches that did not fit the device's memory, although each of their rows did
        self.too_large: list[int] = []

    def begin(self, rows: Rows) -> None:
        """Begin a batch, and finish earlier ones until no more are in flight than the backend allows."""
        try:
            self._begun.append((rows, self._backend.forward(self._prepared.tokens_of(rows), rows)))
        except OF_THE_WORKER:
            raise
        except Exception as error:  # noqa: BLE001  (any error that a row causes is the error of its record)
            self.failed.append((rows, error))
        self.finish(self._backend.ahead)
        self.split_failed()

    def finish(self, but: int = 0) -> None:
        """Finish batches until at most `but` of them are in flight."""
        while len(self._begun) > but:
            rows, output = self._begun.popleft()
            try:
                self._store(rows, output)
            except OF_THE_WORKER:
                raise
            except Exception as error:  # noqa: BLE001  (as above)
                self.failed.append((rows, error))
            else:
                self._report(rows)

    def keep(self, rows: Rows, vectors: Found) -> None:
        """Take the vectors of a batch that was begun and finished elsewhere."""
        self._take(rows, vectors)
        self._report(rows)

    def split_failed(self) -> None:
        """Finish all batches, and halve those that failed until the rows to blame are found."""
        if not self.failed:
            return
        self.finish()
        failed, self.failed = self.failed, []
        for rows, error in failed:
            self._split(rows, error)

    def again(self, row: int) -> None:
        """Encode a row without a vector once more, alone. No batch may be in flight.

        If it overflowed, it is encoded in a type of larger range, where the backend has one.
        """
        rows = np.array([row], np.int64)
        before = self.bad.pop(row)
        self.elsewhere.discard(row)
        overflowed = before[0] is ErrorCode.NON_FINITE
        wider = self._backend.forward_wider if overflowed and isinstance(self._backend, Widens) else None
        forward = wider or self._backend.forward
        try:
            self._store(rows, forward(self._prepared.tokens_of(rows), rows))
        except OF_THE_WORKER:
            raise
        except Exception as error:  # noqa: BLE001  (as above)
            if wider:
                self.bad[row] = before
            else:
                self._blame(row, error)
        self._report(rows)

    def _split(self, rows: Rows, error: Exception) -> None:
        if len(rows) == 1:
            self._blame(int(rows[0]), error)
            self._report(rows)
            if not self._checked:  # at the first row: a worker that can encode nothing should not try them all
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
            else:
                self._report(half)
        code = ErrorCode.OUT_OF_MEMORY
        if is_out_of_memory(error) and not any(self.bad.get(row, ("",))[0] is code for row in rows.tolist()):
            lengths = self._prepared.tokens.lengths[rows]
            self.too_large.append(size_of(lengths, by_sum=self._backend.budget_by_sum))

    def _store(self, rows: Rows, output: Any) -> None:
        self._take(rows, self._backend.finish(output, normalize=self._prepared.unit))

    def _take(self, rows: Rows, vectors: Found) -> None:
        self.vectors[rows] = vectors
        for row in rows[~finite(vectors)].tolist():
            self.bad[row] = (ErrorCode.NON_FINITE, "the model's output holds infinity or NaN")
            self.vectors[row] = self._nothing

    def _blame(self, row: int, error: Exception) -> None:
        code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.ENCODE_ERROR
        self.bad[row] = (code, f"the backend failed: {first_line(error)}")
        if may_work_elsewhere(error):
            self.elsewhere.add(row)

    def _report(self, rows: Rows) -> None:
        self._on_batch(int(self._prepared.tokens.lengths[rows].sum()))


def may_work_elsewhere(error: Exception) -> bool:
    """Whether an error says that this process lacks something which another one may have: memory, files, libraries."""
    return is_out_of_memory(error) or isinstance(error, OSError | ImportError | EmbedctlError)

"""One thread begins the batches of all chunks on a device, and joins those that wait into large ones."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embedctl_config.errors import WorkerSick
from embedctl_workers.arrays.tokens import Found, Tokens
from embedctl_workers.backends.base import Backend, WarmsThreads, is_out_of_memory
from embedctl_workers.encoding.prepared import DeviceUse
from embedctl_workers.redaction import first_line, redacted_exc_info

log = logging.getLogger(__name__)

#: After so many batches that fit the memory, twice as much is joined again: it may have lacked for a moment, or for one
#: record. Where it is too small, one batch of so many is tried in vain.
_TO_TRUST_AGAIN = 256


@dataclass(eq=False, slots=True)
class Piece:
    """A batch of one chunk, on its way to the device alone or joined with those of other chunks."""

    backend: Backend
    tokens: Tokens  #: its texts; a batch holds all of them, in this order
    unit: bool  #: whether its vectors are normalised
    budget: int  #: the most tokens of the batch that it is joined into
    use: DeviceUse  #: is asked whether the chunk is still wanted
    #: as the backend finished them; or the error of the batch, or that of `use`
    vectors: Future[Found] = field(default_factory=Future)
    joined: bool = False  #: whether the batch held other pieces too; known with `vectors`

    @property
    def size(self) -> int:
        return int(self.tokens.lengths.sum())

    @property
    def key(self) -> object:
        """Equal for pieces that may be in one batch."""
        columns = frozenset(self.tokens.columns)
        return id(self.backend), self.tokens.outputs, self.tokens.prompt_tokens, columns, self.unit


@dataclass(frozen=True, slots=True)
class _Begun:
    """A batch on the device."""

    pieces: Sequence[Piece]
    output: Any


class Launcher:
    """Begins batches on a device in one thread, and finishes them in another.

    While the device is busy, pieces wait until they fill half a batch. When it is idle, what waits is begun at once. So
    a device that is slower than its host gets large batches, and one that is faster waits for nothing. The lock is held
    while a batch is begun: whoever else holds it may use the device.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._device = lock
        self._changed = threading.Condition()
        self._waiting: deque[Piece] = deque()
        self._begun: deque[_Begun] = deque()
        self._owed: set[Piece] = set()
        self._most: dict[int, int] = {}
        self._fitted = 0
        self._to_warm_up: list[tuple[WarmsThreads, Future[None]]] = []
        self._started = self._closed = False
        self._broken: WorkerSick | None = None

    def begin(self, pieces: Collection[Piece]) -> None:
        """Have pieces begun, in this order; WorkerSick if a thread of this launcher has ended."""
        with self._changed:
            if self._broken:
                raise self._broken
            self._start()
            self._owed.update(pieces)
            self._waiting.extend(pieces)
            self._changed.notify_all()

    @contextmanager
    def launched(self, pieces: Collection[Piece]) -> Iterator[None]:
        """A context that begins pieces, as :meth:`begin`; if it ends with an error, those not begun are forgotten."""
        self.begin(pieces)
        try:
            yield
        except BaseException:
            with self._changed:
                self._owed.difference_update(pieces)
                self._waiting = deque(piece for piece in self._waiting if piece not in pieces)
            raise

    def warm_up(self, backend: WarmsThreads) -> None:
        """Do the one-time work of the thread that begins batches."""
        done: Future[None] = Future()
        with self._changed:
            self._start()
            self._to_warm_up.append((backend, done))
            self._changed.notify_all()
        done.result()

    def close(self) -> None:
        """End the threads once no batch is in flight. Pieces that wait are not begun."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for name, work in (("launching", self._launch_all), ("finishing", self._finish_all)):
                threading.Thread(target=self._watched, args=[work], name=name, daemon=True).start()

    def _watched(self, work: Callable[[], None]) -> None:
        """Run the work of a thread. If the thread can't go on, nobody waits for it for ever."""
        try:
            work()
        except Exception as error:
            log.critical("the thread that runs the device ends", exc_info=redacted_exc_info(error))
            broken = WorkerSick(f"the thread that runs the device has ended: {first_line(error)}")
            with self._changed:
                self._broken, owed = broken, list(self._owed)
                self._changed.notify_all()
            for piece in owed:
                self._settle(piece, broken)

    def _settle(self, piece: Piece, found: Found | Exception) -> None:
        """Give a piece its vectors or its error, unless it has one."""
        with self._changed:
            if piece not in self._owed:
                return
            self._owed.remove(piece)
        if isinstance(found, Exception):
            piece.vectors.set_exception(found)
        else:
            piece.vectors.set_result(found)

    def _launch_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or self._to_warm_up or self._is_time())
                if self._ends:
                    return
                to_warm_up, self._to_warm_up = self._to_warm_up, []
                pieces = self._take() if self._is_time() else []
            for backend, done in to_warm_up:
                self._warm_up(backend, done)
            if pieces:
                self._launch(pieces)

    def _is_time(self) -> bool:
        """Whether a batch should be begun now. The condition is held."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        if not self._begun:
            return True
        return len(self._begun) <= first.backend.ahead and 2 * self._size(first) >= self._budget(first)

    def _size(self, first: Piece) -> int:
        return sum(piece.size for piece in self._waiting if piece.key == first.key)

    def _budget(self, piece: Piece) -> int:
        return min(piece.budget, self._most.get(id(piece.backend), piece.budget))

    def _take(self) -> list[Piece]:
        """The first piece, and those that fit into a batch with it. The condition is held."""
        first = self._waiting.popleft()
        taken, left, room = [first], deque[Piece](), self._budget(first) - first.size
        for piece in self._waiting:
            if room >= 0 and piece.key == first.key:
                room -= piece.size  # a chunk's pieces stay in order: after one that does not fit, none is taken
                if room >= 0:
                    taken.append(piece)
                    continue
            left.append(piece)
        self._waiting = left
        return taken

    def _launch(self, pieces: Sequence[Piece]) -> None:
        with self._device:
            # Not before the device is free: from this on, a chunk is watched for making progress.
            pieces = [piece for piece in pieces if self._is_wanted(piece)]
            if not pieces:
                return
            for piece in pieces:
                piece.joined = len(pieces) > 1
            try:
                tokens = Tokens.joined([piece.tokens for piece in pieces])
                output = pieces[0].backend.forward(tokens, np.arange(len(tokens.lengths)))
            except Exception as error:  # noqa: BLE001  (the owners of the pieces find out what is to blame)
                self._fail(pieces, error)
                return
        with self._changed:
            self._begun.append(_Begun(pieces, output))
            self._changed.notify_all()

    def _finish_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or self._begun)
                if self._broken or not self._begun:
                    return
                begun = self._begun[0]
            self._finish(begun)
            with self._changed:
                self._begun.popleft()
                self._changed.notify_all()

    def _finish(self, begun: _Begun) -> None:
        first = begun.pieces[0]
        try:
            vectors = first.backend.finish(begun.output, normalize=first.unit)
        except Exception as error:  # noqa: BLE001  (as above)
            self._fail(begun.pieces, error)
            return
        ends = np.cumsum([len(piece.tokens.lengths) for piece in begun.pieces])
        for piece, its_own in zip(begun.pieces, np.split(vectors, ends[:-1]), strict=True):
            self._settle(piece, its_own)
        self._trust_again(begun.pieces)

    def _trust_again(self, pieces: Sequence[Piece]) -> None:
        backend = id(pieces[0].backend)
        if (most := self._most.get(backend)) is None or 2 * sum(piece.size for piece in pieces) < most:
            return
        self._fitted += 1
        if self._fitted >= _TO_TRUST_AGAIN:
            self._most[backend], self._fitted = 2 * most, 0

    def _fail(self, pieces: Sequence[Piece], error: Exception) -> None:
        size = sum(piece.size for piece in pieces)
        if len(pieces) > 1 and is_out_of_memory(error):
            # Another batch, begun earlier, may have been smaller and failed too.
            most = self._most[id(pieces[0].backend)] = max(1, min(self._budget(pieces[0]), size // 2))
            self._fitted = 0
            log.warning("the device's memory is too small for %d tokens: batches are joined up to %d", size, most)
        elif len(pieces) > 1:
            log.warning("a batch of %d pieces failed (%s): trying each alone", len(pieces), type(error).__name__)
        for piece in pieces:
            self._settle(piece, error)

    def _warm_up(self, backend: WarmsThreads, done: Future[None]) -> None:
        try:
            with self._device:
                backend.warm_up_thread()
        except Exception as error:  # noqa: BLE001  (the caller decides)
            done.set_exception(error)
        else:
            done.set_result(None)

    def _is_wanted(self, piece: Piece) -> bool:
        """Whether a piece is to be begun; else its owner is told why not."""
        try:
            piece.use.check_wanted()
        except Exception as error:  # noqa: BLE001  (raised in the owner's thread)
            self._settle(piece, error)
            return False
        return True

    @property
    def _ends(self) -> bool:
        return self._closed or self._broken is not None

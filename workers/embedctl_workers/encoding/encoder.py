"""A chunk through tokenise → batches → backend, with the order restored and every bad record alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from embedctl.records import kind_in_words
from embedctl_config.errors import BrokerUnavailable, JobError
from embedctl_config.wire import ChunkInput, ErrorCode, RecordError, RecordKind, Truncation
from embedctl_workers.arrays.batching import batches_of
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors, Windows
from embedctl_workers.arrays.vectors import mean_of_windows, unit
from embedctl_workers.backends.base import Backend, RemembersBudget
from embedctl_workers.encoding.inflight import OF_THE_WORKER, Batches, is_of_surroundings
from embedctl_workers.encoding.prepared import Prepared
from embedctl_workers.redaction import first_line

if TYPE_CHECKING:
    from embedctl_workers.encoding.known_good import KnownGood

log = logging.getLogger(__name__)


class Stopped(Exception):
    """Raised between two batches when nobody wants the chunk any more."""


#: What a record has no part in, whatever it was that was done with it.
NOT_OF_A_RECORD = (Stopped, *OF_THE_WORKER, BrokerUnavailable, JobError)


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Vectors of a chunk, float32, records × dim, NaN where a record failed; and what happened on the way.

    Attributes:
        tokens: that the device was given, without padding.
        positions: the same with padding; of a batch that was halved, as if it had not been.
        doubtful: the rows that failed here and might not elsewhere: the backend failed on them, twice.
        elsewhere: those of them that failed for want of something that another process may have.
    """

    vectors: Vectors
    errors: list[RecordError]
    truncations: list[Truncation]
    tokens: int
    positions: int
    doubtful: frozenset[int] = frozenset()
    elsewhere: frozenset[int] = frozenset()


class ChunkEncoder:
    """Encodes chunks with one backend.

    Attributes:
        known_good: asked where records fail; where None, they are always to blame.
    """

    def __init__(self, backend: Backend, token_budget: int) -> None:
        self.backend = backend
        self.known_good: KnownGood | None = None
        self._token_budget = token_budget

    def dim_of(self, options: Mapping[str, Any]) -> int:
        """Length of the vectors that a job of these options gets; of one that asks for too many, none has any."""
        dimensions = options.get("dimensions")
        return self.backend.dim if dimensions is None else min(int(dimensions), self.backend.dim)

    def prepare(
        self, chunk: ChunkInput, options: Mapping[str, Any], *, about: Mapping[str, object] | None = None
    ) -> Prepared:
        """Check, deduplicate and tokenise a chunk; needs no device.

        Args:
            options: the job's: `prompt`, `truncation`, `normalize`, `dimensions`.
            about: fields for the lines of the log about this chunk.

        Raises:
            WorkerSick: texts can't be tokenised, and neither can one that could be at the worker's start.
        """
        mean = options.get("truncation") == "mean"
        hopeless = self._too_many(options)
        errors: dict[int, RecordError] = {}
        distinct: dict[bytes, int] = {}
        source = np.full(len(chunk), -1, np.int64)
        for row, (kind, text) in enumerate(zip(chunk.kinds, chunk.texts, strict=True)):
            problem = _problem(kind, text) or hopeless
            if problem is None:
                source[row] = distinct.setdefault(text, len(distinct))
            else:
                errors[row] = RecordError(row, *problem)
        texts = [text.decode() for text in distinct]
        prompt = options.get("prompt")
        tokens, bad = self._tokenize(texts, prompt, about)
        if options.get("truncation") == "error":
            bad |= {at: (ErrorCode.TOO_LONG, self._too_long(tokens, at)) for at in np.flatnonzero(tokens.lost).tolist()}
        _fail(source, bad, errors)
        windows = tokens.windows() if mean and tokens.windows is not None else None
        if windows is not None:
            tokens = replace(windows.tokens, prompt_tokens=tokens.prompt_tokens)
        wanted = np.setdiff1d(np.arange(len(texts)), list(bad))
        return Prepared(
            rows=len(chunk),
            source=source,
            texts=len(texts),
            tokens=replace(tokens, windows=None),  # it holds much that only windows are made of
            batches=self._batches(tokens, wanted, windows),
            windows=windows,
            dim=self.dim_of(options),
            raw=mean or options.get("dimensions") is not None,
            normalize=bool(options.get("normalize", True)),
            errors=errors,
            about=about,
        )

    def encode(
        self,
        prepared: Prepared,
        *,
        on_batch: Callable[[int], None] | None = None,
        wanted: Callable[[], bool] = lambda: True,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> EncodedChunk:
        """Run the device.

        Args:
            on_batch: called after each batch with its tokens.
            wanted: asked before each batch.
            turn: gives what is held while batches are begun, and not while the last of them are waited for: meanwhile
                another thread may begin those of the next chunk. Called again where some of those failed.

        Raises:
            Stopped: it was no longer wanted.
            DeviceLost: by the backend.
            WorkerSick: the backend failed, and fails with what it could do at the worker's start.
        """
        tokens = prepared.tokens
        encoded = np.full((len(tokens.lengths), self.backend.dim), np.nan, np.float32)
        bad: dict[int, tuple[ErrorCode, str]] = {}
        batches = Batches(self.backend, prepared, encoded, bad, on_batch, self.check_worker)
        with turn():
            for batch in prepared.batches:
                if not wanted():
                    raise Stopped
                batches.begin(batch)
        batches.finish()
        if batches.failed or bad:
            with turn():
                batches.split_failed()
                self._try_again(batches, bad, wanted)
        self._remember_limits(batches.too_large)
        lacking = batches.elsewhere
        if prepared.windows is not None:
            text_of = prepared.windows.text
            bad = {int(text_of[row]): bad[row] for row in sorted(bad, reverse=True)}
            lacking = {int(text_of[row]) for row in lacking}
        before = set(prepared.errors)
        elsewhere = (
            frozenset(np.flatnonzero(np.isin(prepared.source, list(lacking))).tolist()) if lacking else frozenset()
        )
        _fail(prepared.source, bad, prepared.errors)
        distinct = _refined(prepared, encoded)
        vectors = np.full((prepared.rows, prepared.dim), np.nan, np.float32)
        good = np.flatnonzero(prepared.source >= 0)
        vectors[good] = distinct[prepared.source[good]]
        return EncodedChunk(
            vectors=vectors,
            errors=[prepared.errors[row] for row in sorted(prepared.errors)],
            truncations=[
                Truncation(int(row), int(tokens.lengths[at]), int(tokens.lost[at]))
                for row in good
                if tokens.lost[at := prepared.source[row]]
            ],
            tokens=int(sum(tokens.lengths[batch].sum() for batch in prepared.batches)),
            positions=sum(self.backend.positions(tokens.lengths[batch]) for batch in prepared.batches),
            doubtful=frozenset(prepared.errors.keys() - before),
            elsewhere=elsewhere,
        )

    def encode_alone(
        self,
        chunk: ChunkInput,
        row: int,
        options: Mapping[str, Any],
        *,
        on_batch: Callable[[int], None] | None = None,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
        about: Mapping[str, object] | None = None,
    ) -> EncodedChunk:
        """One row of a chunk, which fails where anything goes wrong with it; vectors are 1 × dim.

        Raises:
            Stopped, DeviceLost, WorkerSick: as for :meth:`encode`.
        """
        try:
            return self.encode(self.prepare(chunk.select([row]), options, about=about), on_batch=on_batch, turn=turn)
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:  # noqa: BLE001  (whatever one text does is that record's error)
            with turn():
                self.check_worker()
            nothing = np.full((1, self.dim_of(options)), np.nan, np.float32)
            failure = RecordError(0, ErrorCode.ENCODE_ERROR, f"it could not be encoded: {first_line(error)}")
            row_0 = frozenset({0})
            elsewhere = row_0 if is_of_surroundings(error) else frozenset()
            return EncodedChunk(nothing, [failure], [], 0, 0, row_0, elsewhere)

    def check_worker(self) -> None:
        """Tell whether the worker can do what it could at its start. Nobody else may run the device meanwhile.

        Raises:
            WorkerSick: it can't.
            DeviceLost: by the backend.
        """
        if self.known_good is not None:
            self.known_good.check()

    def _try_again(
        self, batches: Batches, bad: Mapping[int, tuple[ErrorCode, str]], wanted: Callable[[], bool]
    ) -> None:
        """What failed may have failed for want of something that is there again: only what fails twice has failed."""
        if not bad:
            return
        self.check_worker()
        for row in sorted(bad):
            if not wanted():
                raise Stopped
            batches.again(row)
        if bad:
            self.check_worker()

    def _batches(self, tokens: Tokens, wanted: Rows, windows: Windows | None) -> list[Rows]:
        """Rows in batches; where pooling leaves out a prompt, no batch holds windows with and without one."""
        if windows is None:
            parts = [wanted]
        else:
            first = int(windows.text.max()) + 1
            rows = np.flatnonzero(np.isin(windows.text, wanted))
            parts = [rows] if tokens.prompt_tokens is None else [rows[rows < first], rows[rows >= first]]
        cut = partial(batches_of, token_budget=self._token_budget, batch_cost=self.backend.batch_cost)
        return [part[batch] for part in parts for batch in cut(tokens.lengths[part])]

    def _tokenize(
        self, texts: Sequence[str], prompt: str | None, about: Mapping[str, object] | None
    ) -> tuple[Tokens, dict[int, tuple[ErrorCode, str]]]:
        """Tokenise texts; where that fails, find the texts that fail alone and put empty ones in their place."""
        if not texts:
            return Tokens(lengths=np.zeros(0, np.int64), lost=np.zeros(0, np.int64)), {}
        try:
            return self.backend.tokenize(texts, prompt), {}
        except Exception as error:  # noqa: BLE001  (whatever one text does to the tokeniser is that record's error)
            log.warning(
                "tokenising %d texts failed (%s): trying each alone", len(texts), type(error).__name__, extra=about
            )
        bad: dict[int, tuple[ErrorCode, str]] = {}
        for at, text in enumerate(texts):
            try:
                self.backend.tokenize([text], prompt)
            except Exception as error:  # noqa: BLE001  (as above)
                bad[at] = (ErrorCode.ENCODE_ERROR, f"the tokeniser failed: {first_line(error)}")
        if bad and self.known_good is not None:
            self.known_good.check_preparing()
        harmless = ["" if at in bad else text for at, text in enumerate(texts)]
        return self.backend.tokenize(harmless, prompt), bad

    def _remember_limits(self, too_large: Sequence[int]) -> None:
        """Batches were too large for the device, and no single row of them was: make no batch so large again."""
        for positions in too_large:
            if positions // 2 < self._token_budget:
                self._token_budget = max(1, positions // 2)
                log.warning(
                    "the device's memory is too small for %d tokens: budget is now %d", positions, self._token_budget
                )
                if isinstance(self.backend, RemembersBudget):
                    self.backend.remember_budget(self._token_budget)

    def _too_many(self, options: Mapping[str, Any]) -> tuple[ErrorCode, str] | None:
        dimensions = options.get("dimensions")
        if dimensions is None or dimensions <= self.backend.dim:
            return None
        return (
            ErrorCode.ENCODE_ERROR,
            f"{dimensions} dimensions asked for, and the model's vectors have {self.backend.dim}",
        )

    def _too_long(self, tokens: Tokens, at: int) -> str:
        total = int(tokens.lengths[at] + tokens.lost[at])
        return f"{total} tokens, and the model takes {self.backend.max_tokens}"


def _problem(kind: int, text: bytes) -> tuple[ErrorCode, str] | None:
    if kind == RecordKind.NOT_TEXT:
        return ErrorCode.NOT_TEXT, f"the text field holds {kind_in_words(text.decode(errors='replace'))}, not text"
    if kind == RecordKind.INVALID_UTF8:
        return ErrorCode.INVALID_UTF8, "the text is not valid UTF-8"
    if kind == RecordKind.OVERSIZE:
        return ErrorCode.TOO_LONG, f"{text.decode(errors='replace')} bytes, more than max_text_bytes allows"
    if not text.strip():
        return ErrorCode.EMPTY, "the text is empty"
    return None


def _refined(prepared: Prepared, encoded: Vectors) -> Vectors:
    """The vectors of the distinct texts, float32, texts × dim, of the rows that the backend encoded."""
    if not prepared.raw:
        return encoded
    if prepared.windows is not None:
        encoded = mean_of_windows(encoded, prepared.windows.text, prepared.windows.content)
    vectors = encoded[:, : prepared.dim]
    return unit(vectors) if prepared.normalize else vectors


def _fail(source: Rows, bad: Mapping[int, tuple[ErrorCode, str]], errors: dict[int, RecordError]) -> None:
    """Give every record that holds a bad text that text's error."""
    if not bad:
        return
    for row in np.flatnonzero(np.isin(source, list(bad))).tolist():
        errors[row] = RecordError(row, *bad[int(source[row])])
        source[row] = -1

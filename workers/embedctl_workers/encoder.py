"""A chunk through tokenise → batches → backend, with the order restored and every bad record alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embedctl_config.wire import ChunkInput, ErrorCode, RecordError, RecordKind, Truncation
from embedctl_workers.backends.base import Backend, Rows, Tokens, Vectors, is_out_of_memory
from embedctl_workers.batching import batches_of

log = logging.getLogger(__name__)


class Stopped(Exception):
    """Raised between two batches when nobody wants the chunk any more."""


@dataclass(slots=True)
class Prepared:
    """A chunk that is ready for the device.

    Attributes:
        source: int64, one a record: which of the distinct texts it holds, or -1 where it failed already.
        tokens: of the distinct texts.
        errors: by record.
    """

    rows: int
    source: Rows
    tokens: Tokens
    batches: list[Rows]
    normalize: bool
    errors: dict[int, RecordError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Vectors of a chunk, float32, records × dim, NaN where a record failed; and what happened on the way."""

    vectors: Vectors
    errors: list[RecordError]
    truncations: list[Truncation]
    tokens: int


class ChunkEncoder:
    """Encodes chunks with one backend."""

    def __init__(self, backend: Backend, token_budget: int) -> None:
        self.backend = backend
        self._token_budget = token_budget

    def prepare(self, chunk: ChunkInput, options: Mapping[str, Any]) -> Prepared:
        """Check, deduplicate and tokenise a chunk; needs no device.

        Args:
            options: the job's: `prompt`, `truncation`, `normalize`.
        """
        errors: dict[int, RecordError] = {}
        distinct: dict[bytes, int] = {}
        source = np.full(len(chunk), -1, np.int64)
        for row, (kind, text) in enumerate(zip(chunk.kinds, chunk.texts, strict=True)):
            problem = _problem(kind, text)
            if problem is None:
                source[row] = distinct.setdefault(text, len(distinct))
            else:
                errors[row] = RecordError(row, *problem)
        texts = [text.decode() for text in distinct]
        prompt = options.get("prompt")
        tokens, bad = self._tokenize(texts, prompt)
        if options.get("truncation") == "error":
            bad |= {at: (ErrorCode.TOO_LONG, self._too_long(tokens, at)) for at in np.flatnonzero(tokens.lost).tolist()}
        _fail(source, bad, errors)
        wanted = np.setdiff1d(np.arange(len(texts)), list(bad))
        batches = [wanted[batch] for batch in batches_of(tokens.lengths[wanted], self._token_budget)]
        return Prepared(len(chunk), source, tokens, batches, bool(options.get("normalize", True)), errors)

    def encode(
        self,
        prepared: Prepared,
        *,
        on_batch: Callable[[int], None] | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> EncodedChunk:
        """Run the device.

        Args:
            on_batch: called after each batch with its tokens.
            wanted: asked before each batch.

        Raises:
            Stopped: it was no longer wanted.
        """
        tokens = prepared.tokens
        distinct = np.full((len(tokens.lengths), self.backend.dim), np.nan, np.float32)
        bad: dict[int, tuple[ErrorCode, str]] = {}
        for batch in prepared.batches:
            if not wanted():
                raise Stopped
            self._encode_rows(prepared, batch, distinct, bad)
            if on_batch is not None:
                on_batch(int(tokens.lengths[batch].sum()))
        _fail(prepared.source, bad, prepared.errors)
        vectors = np.full((prepared.rows, self.backend.dim), np.nan, np.float32)
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
        )

    def _tokenize(self, texts: Sequence[str], prompt: str | None) -> tuple[Tokens, dict[int, tuple[ErrorCode, str]]]:
        """Tokenise texts; where that fails, find the texts that fail alone and put empty ones in their place."""
        if not texts:
            return Tokens(lengths=np.zeros(0, np.int64), lost=np.zeros(0, np.int64)), {}
        try:
            return self.backend.tokenize(texts, prompt), {}
        except Exception as error:  # noqa: BLE001  (whatever one text does to the tokeniser is that record's error)
            log.warning("tokenising %d texts failed (%s): trying each alone", len(texts), type(error).__name__)
        bad: dict[int, tuple[ErrorCode, str]] = {}
        for at, text in enumerate(texts):
            try:
                self.backend.tokenize([text], prompt)
            except Exception as error:  # noqa: BLE001  (as above)
                bad[at] = (ErrorCode.ENCODE_ERROR, f"the tokeniser failed: {first_line(error)}")
        harmless = ["" if at in bad else text for at, text in enumerate(texts)]
        return self.backend.tokenize(harmless, prompt), bad

    def _encode_rows(
        self, prepared: Prepared, rows: Rows, into: Vectors, bad: dict[int, tuple[ErrorCode, str]]
    ) -> None:
        """Encode a batch; where that fails, halve it until the rows that fail stand alone."""
        try:
            output = self.backend.forward(prepared.tokens, rows)
            into[rows] = self.backend.finish(output, normalize=prepared.normalize)
        except Exception as error:  # noqa: BLE001  (whatever one row does to the backend is that record's error)
            code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.ENCODE_ERROR
            if len(rows) == 1:
                bad[int(rows[0])] = (code, f"the backend failed: {first_line(error)}")
                return
            log.warning("a batch of %d rows failed (%s): halving it", len(rows), type(error).__name__)
            middle = len(rows) // 2
            self._encode_rows(prepared, rows[:middle], into, bad)
            self._encode_rows(prepared, rows[middle:], into, bad)
            if code is ErrorCode.OUT_OF_MEMORY and not any(bad.get(row, ("",))[0] is code for row in rows.tolist()):
                self._remember_limit(prepared.tokens.lengths[rows])
            return
        for row in rows[~np.isfinite(into[rows]).all(axis=1)].tolist():
            bad[row] = (ErrorCode.NON_FINITE, "the model's output holds infinity or NaN")

    def _remember_limit(self, lengths: Rows) -> None:
        """A batch was too large for the device, and no single row of it was: make no batch so large again."""
        too_large = int(lengths.max()) * len(lengths)
        if too_large // 2 < self._token_budget:
            self._token_budget = max(1, too_large // 2)
            log.warning(
                "the device's memory is too small for %d tokens: budget is now %d", too_large, self._token_budget
            )

    def _too_long(self, tokens: Tokens, at: int) -> str:
        total = int(tokens.lengths[at] + tokens.lost[at])
        return f"{total} tokens, and the model takes {self.backend.max_tokens}"


def _problem(kind: int, text: bytes) -> tuple[ErrorCode, str] | None:
    if kind == RecordKind.NOT_TEXT:
        return ErrorCode.NOT_TEXT, f"the text field holds a {text.decode(errors='replace')}, not text"
    if kind == RecordKind.INVALID_UTF8:
        return ErrorCode.INVALID_UTF8, "the text is not valid UTF-8"
    if kind == RecordKind.OVERSIZE:
        return ErrorCode.TOO_LONG, f"{text.decode(errors='replace')} bytes, more than max_text_bytes allows"
    if not text.strip():
        return ErrorCode.EMPTY, "the text is empty"
    return None


def _fail(source: Rows, bad: Mapping[int, tuple[ErrorCode, str]], errors: dict[int, RecordError]) -> None:
    """Give every record that holds a bad text that text's error."""
    if not bad:
        return
    for row in np.flatnonzero(np.isin(source, list(bad))).tolist():
        errors[row] = RecordError(row, *bad[int(source[row])])
        source[row] = -1


def first_line(error: Exception) -> str:
    """Kind and beginning of a backend's error. Never all of it: some quote the text that they failed on."""
    line = str(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {line}"

"""Encodes a chunk: tokenise → batches → backend. Order is restored, and a record that fails fails alone."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from embedctl.corpus.records import problem_of
from embedctl_config.errors import BrokerUnavailable, JobError
from embedctl_config.model_names import not_matryoshka, unknown_prompt
from embedctl_config.outputs import PLAIN, Output, asked_by, not_given
from embedctl_config.wire import ChunkInput, ErrorCode, RecordError, Truncation
from embedctl_workers.arrays.batching import batches_of
from embedctl_workers.arrays.outputs import nothing
from embedctl_workers.arrays.tokens import Found, Rows, Side, Tokens, Windows
from embedctl_workers.arrays.vectors import mean_of_windows, unit
from embedctl_workers.backends.base import Backend
from embedctl_workers.encoding.inflight import OF_THE_WORKER, Batches, may_work_elsewhere
from embedctl_workers.encoding.joining import Launcher, Piece
from embedctl_workers.encoding.prepared import SOLE_USE, DeviceUse, Prepared, Stopped
from embedctl_workers.redaction import first_line

log = logging.getLogger(__name__)


#: Errors that no record is to blame for.
NOT_OF_A_RECORD = (Stopped, *OF_THE_WORKER, BrokerUnavailable, JobError)


#: The option `long` of a job → the end that a text which is too long loses, if not as the model's tokenizer says.
_SIDES: Mapping[object, Side] = {"cut-left": "left", "cut-right": "right"}


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The vectors of a chunk, and what happened to its records."""

    #: float32, records × dim, or records × outputs of cells; NaN or None in the row of a record that failed
    vectors: Found
    errors: list[RecordError]
    truncations: list[Truncation]
    tokens: int  #: how many tokens the device was given, without padding
    positions: int  #: the same with padding; a batch that was halved counts as if it had not been
    #: int64, the tokens of each record, whether or not another one shares them; 0 for a record that failed
    counts: Rows
    #: rows on which the backend failed twice, and another worker's backend might not
    doubtful: frozenset[int] = frozenset()
    #: those of them that failed because this process lacks something, such as memory
    elsewhere: frozenset[int] = frozenset()


class SelfCheck(Protocol):
    """What a worker can find out about itself; see :class:`~embedctl_workers.encoding.known_good.KnownGood`."""

    def check(self) -> None: ...

    def check_preparing(self) -> None: ...


class ChunkEncoder:
    """Encodes chunks with one backend, in batches of at most `token_budget` tokens; `prompts` are the model's, by name.

    `known_good` is the worker's check of itself; None: the records are always to blame.
    """

    def __init__(
        self, backend: Backend, token_budget: int, *, model: str = "", prompts: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.backend = backend
        self.prompts = prompts
        #: whether the first components of a vector are a vector too, as far as the model's files say
        self.matryoshka = True
        #: how these say that vectors are made of tokens' states; empty if they do not
        self.pooling = ""
        self._model = model
        self.known_good: SelfCheck | None = None
        self.token_budget = token_budget

    def dim_of(self, options: Mapping[str, Any]) -> int:
        """Length of the vectors of a job with these options."""
        dimensions = options.get("dimensions")
        return self.backend.dim if dimensions is None else min(int(dimensions), self.backend.dim)

    @property
    def own_options(self) -> dict[str, Any]:
        """The options of a job for the model's dense vectors or, if it gives none, for all that it gives."""
        outputs = self.backend.outputs
        return {} if Output.DENSE in outputs else {"vectors": list(outputs)}

    def nothing(self, rows: int, options: Mapping[str, Any]) -> Found:
        """The rows of a chunk of a job with these options, all of them without vectors."""
        return nothing(rows, asked_by(options), self.dim_of(options))

    def prepare(
        self, chunk: ChunkInput, options: Mapping[str, Any], *, about: Mapping[str, object] | None = None
    ) -> Prepared:
        """Check, deduplicate and tokenise a chunk; needs no device.

        The job's options that count are `prompt`, `prompt_name`, `long`, `normalize`, `dimensions` and `vectors`;
        `about` are fields for log lines about this chunk. WorkerSick if texts can't be tokenised, nor can the known
        good text any more.
        """
        long = options.get("long")
        mean = long == "mean"
        texts, source, errors = _distinct_texts(chunk, self._hopeless(options))
        named = options.get("prompt_name")
        prompt = options.get("prompt") if named is None else self.prompts.get(named, "")
        tokens, bad = self._tokenize(texts, prompt, _SIDES.get(long), about)
        if long in ("error", "split"):  # a producer has split the texts by the same tokenizer
            bad |= {at: (ErrorCode.TOO_LONG, self._too_long(tokens, at)) for at in np.flatnonzero(tokens.lost).tolist()}
        _fail(source, bad, errors)
        windows = tokens.windows() if mean and tokens.windows is not None else None
        if windows is not None:
            tokens = replace(windows.tokens, prompt_tokens=tokens.prompt_tokens)
        wanted = np.delete(np.arange(len(texts)), list(bad))
        prepared = Prepared(
            rows=len(chunk),
            source=source,
            texts=len(texts),
            tokens=replace(tokens, windows=None, outputs=asked_by(options)),  # windows keep the uncut texts alive
            batches=self._batches(tokens, wanted, windows),
            windows=windows,
            dim=self.dim_of(options),
            postprocess=mean or options.get("dimensions") is not None,
            normalize=bool(options.get("normalize", True)),
            errors=errors,
            about=about,
        )
        if not self.backend.joins:
            return prepared
        return replace(prepared, pieces=[prepared.tokens_of(rows).select(rows) for rows in prepared.batches])

    def encode(
        self,
        prepared: Prepared,
        use: DeviceUse = SOLE_USE,
        launcher: Launcher | None = None,
        vectors: Found | None = None,
    ) -> EncodedChunk:
        """Run the device. The chunk stays as it was prepared.

        Args:
            launcher: begins the batches if the backend joins them; None: the calling thread does.
            vectors: of this chunk, by :meth:`encode_together`; the device is then used only for rows that failed.

        Raises:
            Stopped: by `use`.
            DeviceLost: by the backend.
            WorkerSick: the backend failed, and fails on the known good text too.
        """
        batches = Batches(self.backend, prepared, use.on_batch, self.check_worker)
        if vectors is not None:
            ends = np.cumsum([len(rows) for rows in prepared.batches])
            for rows, some in zip(prepared.batches, np.split(vectors, ends[:-1]), strict=True):
                batches.keep(rows, some)
        elif launcher is not None and prepared.pieces:
            self._encode_joined(prepared, use, launcher, batches)
        else:
            self._encode_in_turn(prepared.batches, use, batches)
        if batches.failed or batches.bad:
            with use.turn():
                batches.split_failed()
                self._try_again(batches, use)
        self._remember_limits(batches.too_large)
        return self._assemble(prepared, batches)

    def encode_together(self, chunks: Sequence[Prepared], use: DeviceUse = SOLE_USE) -> list[Found]:
        """Encode the rows of several chunks, with equal :attr:`~Prepared.key` and batches, in common batches.

        For each chunk its rows, as the backend finishes them, in the order of its batches. A row whose output holds
        infinity or NaN is as the backend left it. Whatever the backend or `use` raises is raised; no row is known to be
        to blame.
        """
        tokens = Tokens.joined([each.tokens.select(np.concatenate(each.batches)) for each in chunks])
        vectors = nothing(len(tokens.lengths), tokens.outputs, self.backend.dim)
        with use.turn():
            for rows in self._cut(tokens.lengths):
                use.check_wanted()
                output = self.backend.forward(tokens, rows)
                vectors[rows] = self.backend.finish(output, normalize=chunks[0].unit)
                use.on_batch(int(tokens.lengths[rows].sum()))
        ends = np.cumsum([sum(map(len, each.batches)) for each in chunks])
        return np.split(vectors, ends[:-1])

    def _encode_in_turn(self, rows: Collection[Rows], use: DeviceUse, batches: Batches) -> None:
        with use.turn():
            for batch in rows:
                use.check_wanted()
                batches.begin(batch)
        batches.finish()

    def _encode_joined(self, prepared: Prepared, use: DeviceUse, launcher: Launcher, batches: Batches) -> None:
        pieces = [Piece(self.backend, tokens, prepared.unit, self.token_budget, use) for tokens in prepared.pieces]
        doubtful: list[tuple[Rows, Exception]] = []
        with launcher.launched(pieces):
            for rows, piece in zip(prepared.batches, pieces, strict=True):
                try:
                    batches.keep(rows, piece.vectors.result())
                except (Stopped, *OF_THE_WORKER):
                    raise
                except Exception as error:  # noqa: BLE001  (any error that a row causes is the error of its record)
                    # If the piece was joined to others, another chunk may be to blame.
                    (doubtful if piece.joined else batches.failed).append((rows, error))
        if doubtful:
            self._encode_in_turn([rows for rows, _ in doubtful], use, batches)

    def _assemble(self, prepared: Prepared, batches: Batches) -> EncodedChunk:
        """The result of a chunk, by record."""
        tokens, bad, elsewhere = prepared.tokens, batches.bad, batches.elsewhere
        if prepared.windows is not None:
            text_of = prepared.windows.text
            bad = {int(text_of[row]): bad[row] for row in sorted(bad, reverse=True)}
            elsewhere = {int(text_of[row]) for row in elsewhere}
        source, errors = prepared.source.copy(), dict(prepared.errors)
        rows_elsewhere = _records_of(source, elsewhere)
        _fail(source, bad, errors)
        distinct = _postprocessed(prepared, batches.vectors)
        vectors = nothing(prepared.rows, tokens.outputs, prepared.dim)
        counts = np.zeros(prepared.rows, np.int64)
        good = np.flatnonzero(source >= 0)
        vectors[good] = distinct[source[good]]
        counts[good] = _tokens_of_texts(prepared)[source[good]]
        cut = good[tokens.lost[source[good]] > 0]
        return EncodedChunk(
            vectors=vectors,
            errors=[errors[row] for row in sorted(errors)],
            truncations=[
                Truncation(int(row), int(tokens.lengths[source[row]]), int(tokens.lost[source[row]])) for row in cut
            ],
            tokens=int(sum(tokens.lengths[batch].sum() for batch in prepared.batches)),
            positions=sum(self.backend.positions(tokens.lengths[batch]) for batch in prepared.batches),
            counts=counts,
            doubtful=frozenset(errors.keys() - prepared.errors.keys()),
            elsewhere=frozenset(rows_elsewhere),
        )

    def encode_alone(
        self,
        chunk: ChunkInput,
        row: int,
        options: Mapping[str, Any],
        use: DeviceUse = SOLE_USE,
        *,
        about: Mapping[str, object] | None = None,
    ) -> EncodedChunk:
        """Encode one row of a chunk, into a chunk of that row alone; raises as :meth:`encode`.

        Whatever else it causes is the error of that record.
        """
        try:
            return self.encode(self.prepare(chunk.select([row]), options, about=about), use)
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:  # noqa: BLE001  (any error that a text causes is the error of its record)
            with use.turn():
                self.check_worker()
            failure = RecordError(0, ErrorCode.ENCODE_ERROR, f"it could not be encoded: {first_line(error)}")
            row_0 = frozenset({0})
            elsewhere = row_0 if may_work_elsewhere(error) else frozenset()
            return EncodedChunk(self.nothing(1, options), [failure], [], 0, 0, np.zeros(1, np.int64), row_0, elsewhere)

    def check_worker(self) -> None:
        """Check that the worker still encodes the known good text (else WorkerSick, or DeviceLost by the backend).

        Nobody else may run the device meanwhile.
        """
        if self.known_good is not None:
            self.known_good.check()

    def _try_again(self, batches: Batches, use: DeviceUse) -> None:
        """Encode the bad rows once more: what they lacked, such as memory, may be there again."""
        if not batches.bad:
            return
        self.check_worker()
        for row in sorted(batches.bad):
            use.check_wanted()
            batches.again(row)
        if batches.bad:
            self.check_worker()

    def _batches(self, tokens: Tokens, wanted: Rows, windows: Windows | None) -> list[Rows]:
        """Rows in batches. If pooling leaves out the prompt, no batch holds windows with a prompt and without one."""
        if windows is None:
            parts = [wanted]
        else:
            first = int(windows.text.max()) + 1
            rows = np.flatnonzero(np.isin(windows.text, wanted))
            parts = [rows] if tokens.prompt_tokens is None else [rows[rows < first], rows[rows >= first]]
        return [part[batch] for part in parts for batch in self._cut(tokens.lengths[part])]

    def _cut(self, lengths: Rows) -> list[Rows]:
        return batches_of(lengths, self.token_budget, self.backend.batch_cost, by_sum=self.backend.budget_by_sum)

    def _tokenize(
        self, texts: Sequence[str], prompt: str | None, side: Side | None, about: Mapping[str, object] | None
    ) -> tuple[Tokens, dict[int, tuple[ErrorCode, str]]]:
        """Tokenise texts. If that fails, find the texts that fail alone, and put empty ones in their place."""
        if not texts:
            return Tokens(lengths=np.zeros(0, np.int64), lost=np.zeros(0, np.int64)), {}
        try:
            return self.backend.tokenize(texts, prompt, side), {}
        except Exception as error:  # noqa: BLE001  (any error that a text causes is the error of its record)
            log.warning(
                "tokenising %d texts failed (%s): trying each alone", len(texts), type(error).__name__, extra=about
            )
        bad: dict[int, tuple[ErrorCode, str]] = {}
        for at, text in enumerate(texts):
            try:
                self.backend.tokenize([text], prompt, side)
            except Exception as error:  # noqa: BLE001  (as above)
                bad[at] = (ErrorCode.ENCODE_ERROR, f"the tokeniser failed: {first_line(error)}")
        if bad and self.known_good is not None:
            self.known_good.check_preparing()
        harmless = ["" if at in bad else text for at, text in enumerate(texts)]
        return self.backend.tokenize(harmless, prompt, side), bad

    def _remember_limits(self, too_large: Sequence[int]) -> None:
        """Lower the token budget below batches that were too large for the device, unless one of their rows was."""
        for size in too_large:
            if size // 2 < self.token_budget:
                self.token_budget = max(1, size // 2)
                log.warning("the device's memory is too small for %d tokens: budget is now %d", size, self.token_budget)

    def _hopeless(self, options: Mapping[str, Any]) -> tuple[ErrorCode, str] | None:
        """Why no record of a job with these options can be encoded."""
        dimensions, prompt, most = options.get("dimensions"), options.get("prompt_name"), self.backend.dim
        if dimensions is not None and dimensions > most:
            return ErrorCode.NO_DIMENSIONS, f"{dimensions} dimensions asked for, and the model's vectors have {most}"
        if dimensions not in (None, most) and not (self.matryoshka or options.get("dims_anyway")):
            return ErrorCode.NO_DIMENSIONS, not_matryoshka(self._model)
        outputs = asked_by(options)
        if why := not_given(outputs, self.backend.outputs, self._model):
            return ErrorCode.NO_OUTPUT, why
        if outputs != PLAIN and (dimensions is not None or options.get("long") == "mean"):
            return ErrorCode.NO_OUTPUT, "dimensions and long mean are for dense vectors alone"
        if prompt is not None and prompt not in self.prompts:
            return ErrorCode.NO_PROMPT, f"no prompt {prompt!r}: {unknown_prompt(self._model, self.prompts)}"
        return None

    def _too_long(self, tokens: Tokens, at: int) -> str:
        total = int(tokens.lengths[at] + tokens.lost[at])
        return f"{total} tokens, and the model takes {self.backend.max_tokens}"


def _distinct_texts(
    chunk: ChunkInput, hopeless: tuple[ErrorCode, str] | None
) -> tuple[list[str], Rows, dict[int, RecordError]]:
    """The distinct texts of a chunk, which of them each record holds (-1: none), and the errors of the other records.

    `hopeless` is why no record can be encoded.
    """
    errors: dict[int, RecordError] = {}
    distinct: dict[bytes, int] = {}
    source = np.full(len(chunk), -1, np.int64)
    for row, (kind, text) in enumerate(zip(chunk.kinds, chunk.texts, strict=True)):
        problem = problem_of(kind, text) or hopeless
        if problem is None:
            source[row] = distinct.setdefault(text, len(distinct))
        else:
            errors[row] = RecordError(row, *problem)
    return [text.decode() for text in distinct], source, errors


def _postprocessed(prepared: Prepared, encoded: Found) -> Found:
    """What was found for the distinct texts, from that for the rows of tokens."""
    if not prepared.postprocess or prepared.tokens.outputs != PLAIN:
        return encoded
    if prepared.windows is not None:
        encoded = mean_of_windows(encoded, prepared.windows.text, prepared.windows.content)
    vectors = encoded[:, : prepared.dim]
    return unit(vectors) if prepared.normalize else vectors


def _tokens_of_texts(prepared: Prepared) -> Rows:
    """The tokens of each distinct text, in all its windows."""
    lengths = prepared.tokens.lengths
    if prepared.windows is None:
        return lengths
    return np.bincount(prepared.windows.text, lengths, prepared.texts).astype(np.int64)


def _records_of(source: Rows, texts: Collection[int]) -> list[int]:
    """The records that hold some of the distinct texts."""
    return np.flatnonzero(np.isin(source, list(texts))).tolist() if texts else []


def _fail(source: Rows, bad: Mapping[int, tuple[ErrorCode, str]], errors: dict[int, RecordError]) -> None:
    for row in _records_of(source, bad):
        errors[row] = RecordError(row, *bad[int(source[row])])
        source[row] = -1

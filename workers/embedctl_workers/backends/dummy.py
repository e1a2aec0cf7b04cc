"""Deterministic vectors without a model: for tests of everything around a model, and for load tests of the queue."""

from __future__ import annotations

import hashlib
import math
import resource
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np

from embedctl_config.errors import DeviceLost
from embedctl_config.hardware import ModelEntry
from embedctl_config.outputs import PLAIN, Output, outputs_of
from embedctl_workers.arrays.outputs import cells_of, normalized, nothing, weights_of
from embedctl_workers.arrays.tokens import Found, Ragged, Rows, Side, Tokens, Vectors, Windows, in_order_of_windows
from embedctl_workers.backends.base import Backend
from embedctl_workers.machine.cgroup import memory_left
from embedctl_workers.machine.host import Host

#: The words that sparse vectors have weights for.
_VOCABULARY = 30_522


class Poison(StrEnum):
    """Words that make a dummy backend with `poison` misbehave on the text that holds them."""

    CRASH_TOKENIZER = "crash-tokenizer"
    CRASH_ENCODER = "crash-encoder"
    EAT_MEMORY = "eat-memory"
    FAIL_TOKENIZER = "fail-tokenizer"
    FAIL_ENCODER = "fail-encoder"
    HANG_ENCODER = "hang-encoder"
    KILL_ENCODER = "kill-encoder"
    LOSE_DEVICE = "lose-device"
    NOT_A_NUMBER = "not-a-number"
    OUT_OF_MEMORY = "out-of-memory"


class DummyBackend(Backend):
    """Makes a text's vector from a hash of its tokens; a token is a word.

    Options: `dim`, `max_tokens`, `seconds_to_load` and `seconds_per_batch` (it sleeps that long), `seed` (changes the
    vectors and the fingerprint), `memory_tokens` (a batch with more rows × longest row runs out of memory), `poison`
    (the words of :class:`Poison` take effect), `outputs` (those that the model gives, such as `dense,sparse`).

    A text's weights are of its words, and the vectors of its words have `dim` dimensions too.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "dim",
        "max_tokens",
        "seconds_to_load",
        "seconds_per_batch",
        "seed",
        "memory_tokens",
        "poison",
        "outputs",
    )

    def __init__(
        self,
        *,
        dim: int = 8,
        max_tokens: int = 256,
        seconds_to_load: float = 0.0,
        seconds_per_batch: float = 0.0,
        seed: int = 0,
        memory_tokens: int = 0,
        poison: bool = False,
        outputs: str = "dense,sparse,multi",
    ) -> None:
        time.sleep(seconds_to_load)
        self.dim = dim
        self.outputs = outputs_of(outputs)
        self.widths = {Output.SPARSE: _VOCABULARY, Output.MULTI: dim}
        self.engine = "sha256"
        self.max_tokens = max_tokens
        self._seconds = seconds_per_batch
        self._seed = seed
        self._memory_tokens = memory_tokens
        self._poison = poison
        self.fingerprint = hashlib.sha256(f"dummy {dim} {max_tokens} {seed}".encode()).hexdigest()

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        return cls(**options)

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        if self._poison:
            _misbehave({word for text in texts for word in text.split()}, Poison.CRASH_TOKENIZER, Poison.FAIL_TOKENIZER)
        words = [[_token(word) for word in ((prompt or "") + text).split()] for text in texts]
        lost = np.array([max(0, len(row) - self.max_tokens) for row in words], np.int64)
        first = [row[-self.max_tokens :] if truncation_side == "left" else row[: self.max_tokens] for row in words]
        return replace(_tokens(first), lost=lost, windows=partial(self._windows, words) if lost.any() else None)

    def _windows(self, words: Sequence[Sequence[int]]) -> Windows:
        parts, text = in_order_of_windows(
            [[row[at : at + self.max_tokens] for at in range(0, max(1, len(row)), self.max_tokens)] for row in words]
        )
        return Windows(_tokens(parts), text, np.array([len(part) for part in parts], np.int64))

    def forward(self, tokens: Tokens, rows: Rows) -> Found:
        if self._seconds:
            time.sleep(self._seconds)
        if self._memory_tokens and len(rows) * int(tokens.lengths[rows].max()) > self._memory_tokens:
            raise MemoryError(f"{len(rows)} rows of {tokens.lengths[rows].max()} tokens")
        ids = tokens.columns["input_ids"]
        texts = [ids[row].tolist() for row in rows]
        vectors: Found = np.stack([self._vector(text) for text in texts])
        if tokens.outputs != PLAIN:
            vectors = self._cells(texts, vectors, tokens.outputs)
        if self._poison:
            words = [{_WORDS[token] for token in ids[row].tolist() if token in _WORDS} for row in rows]
            _misbehave(set().union(*words), *Poison)
            vectors[[Poison.NOT_A_NUMBER in each for each in words]] = nothing(1, tokens.outputs, self.dim)
        return vectors

    def finish(self, output: Found, *, normalize: bool) -> Found:
        return normalized(output) if normalize else output

    def warm_up(self) -> None:
        """Nothing: a batch takes its seconds whenever it is run."""

    def close(self) -> None:
        """Nothing: it holds nothing."""

    def _cells(self, texts: Sequence[list[int]], vectors: Vectors, outputs: Sequence[Output]) -> Found:
        columns: dict[Output, Sequence[Any]] = {
            Output.DENSE: list(vectors),
            Output.SPARSE: [_weights(text) for text in texts],
            Output.MULTI: [np.stack([self._vector([word]) for word in text or [0]]) for text in texts],
        }
        return cells_of([columns[output] for output in outputs])

    def _vector(self, ids: list[int]) -> Vectors:
        words = hashlib.shake_256(f"{self._seed} {ids}".encode()).digest(2 * self.dim)
        # The values are centred on zero, and none is zero, so that every vector has a direction.
        return (np.frombuffer(words, "<u2").astype(np.float32) - 32767.5) / 32767.5


def _tokens(rows: Sequence[Sequence[int]]) -> Tokens:
    return Tokens(
        lengths=np.array([max(1, len(row)) for row in rows], np.int64),
        lost=np.zeros(len(rows), np.int64),
        columns={"input_ids": Ragged.of(rows, np.int64)},
    )


def _weights(text: list[int]) -> Any:
    words, counts = np.unique(np.array(text, np.int64) % _VOCABULARY, return_counts=True)
    return weights_of(words, np.log1p(counts))


def _token(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest())


_WORDS = {_token(word): word for word in Poison}


def _misbehave(words: Collection[str], *kinds: Poison) -> None:
    """Misbehave in the first of these ways that is among the words."""
    for kind in kinds:
        if kind not in words:
            continue
        match kind:
            case Poison.CRASH_TOKENIZER | Poison.CRASH_ENCODER:
                signal.raise_signal(signal.SIGSEGV)  # in this thread and at once, like a real fault
            case Poison.KILL_ENCODER:
                signal.raise_signal(signal.SIGKILL)  # like a kernel without memory
            case Poison.EAT_MEMORY:
                _eat_memory()
            case Poison.FAIL_TOKENIZER | Poison.FAIL_ENCODER:
                raise RuntimeError("a text holds a word that makes this backend fail")
            case Poison.HANG_ENCODER:
                time.sleep(24 * 3600)
            case Poison.LOSE_DEVICE:
                raise DeviceLost("a text holds a word that makes this backend lose its device")
            case Poison.OUT_OF_MEMORY:
                raise MemoryError("a text holds a word that makes this backend run out of memory")
            case Poison.NOT_A_NUMBER:
                pass  # it spoils only its own text's vector


def _eat_memory() -> None:
    """Take memory without end. Where nothing bounds that, die as if the kernel had no memory left."""
    is_bounded = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    if not is_bounded and memory_left() == math.inf:
        signal.raise_signal(signal.SIGKILL)
    held = []
    while True:
        # Under a bound, what is asked for counts, and is never touched. A control group counts what is.
        held.append(np.empty(2**28, np.uint8) if is_bounded else np.ones(2**24, np.uint8))

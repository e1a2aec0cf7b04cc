"""The rates of a loaded model on its device, in a worker's batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from threading import Barrier, Lock

import numpy as np

from embedctl_config.errors import ModelError
from embedctl_config.wire import ChunkInput, RecordKind
from embedctl_workers.arrays.tokens import Rows
from embedctl_workers.backends.base import Backend, WarmsThreads
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.joining import Launcher
from embedctl_workers.encoding.prepared import DeviceUse, Prepared, Stopped
from embedctl_workers.models.gate_texts import TEXTS

#: Words per text: the median, and the standard deviation of the logarithm, as in collections of passages (half of them
#: below 20 words, one in twenty above 90).
_MEDIAN_WORDS, _SPREAD = 20.0, 0.9
#: Words of a long text before it is cut to length: every tokenizer makes at least one token of a word.
_WORDS_BEFORE_CUT = 450
#: Texts per chunk: the default of `chunk_size`, and the number of long texts that have about as many tokens.
_MIXED, _LONG = 512, 48
#: Threads with a chunk each, if batches of several chunks are joined: as many chunks as fill a large batch.
_JOINED = 4
#: The longest texts that are measured (tokens): most models take texts of this length.
LONGEST = 450


def mixed_texts(rows: int) -> list[str]:
    """Texts whose lengths are distributed as in collections of passages."""
    rng = np.random.default_rng(0)
    words = " ".join(TEXTS.values()).split()
    counts = np.exp(rng.normal(np.log(_MEDIAN_WORDS), _SPREAD, rows)).astype(int) + 1
    return [" ".join(rng.choice(words, count)) for count in counts]


def long_texts(rows: int, backend: Backend, most_tokens: int) -> list[str]:
    """Texts of about the model's largest number of tokens, or of `most_tokens` if that is less."""
    rng = np.random.default_rng(0)
    words = TEXTS["over-long"].split()
    texts = [list(rng.choice(words, _WORDS_BEFORE_CUT)) for _ in range(rows)]
    whole = backend.tokenize([" ".join(text) for text in texts], None)
    wanted = min(backend.max_tokens, most_tokens)
    return [
        " ".join(text[: max(1, int(_WORDS_BEFORE_CUT * wanted / tokens))])
        for text, tokens in zip(texts, (whole.lengths + whole.lost).tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Load:
    """A chunk to measure with; its batches are in random order, so that a part of them is like the whole."""

    name: str
    texts: list[bytes]
    prepared: Prepared

    @property
    def lengths(self) -> Rows:
        """Tokens of each distinct text, int64."""
        return self.prepared.tokens.lengths


def loads_for(encoder: ChunkEncoder) -> list[Load]:
    """A chunk of mixed lengths, and a chunk of long texts: the model's maximum, or :data:`LONGEST` if that is less."""
    return [mixed_load(encoder), _load(encoder, "long texts", long_texts(_LONG, encoder.backend, LONGEST))]


def mixed_load(encoder: ChunkEncoder) -> Load:
    return _load(encoder, "mixed lengths", mixed_texts(_MIXED))


def encoding_rate(encoder: ChunkEncoder, load: Load, seconds: float) -> float:
    """Tokens/s of encoding a tokenised chunk repeatedly, for `seconds`; a ModelError if some texts can't be encoded.

    As in a worker, if the backend works ahead, the next chunk begins while the last batches of this one are awaited. If
    it joins batches, those of several chunks are joined.
    """
    threads = _JOINED if encoder.backend.joins else 2 if encoder.backend.ahead else 1
    with closing(_TimedUse(seconds)) as use:
        _in_threads(lambda: _encode_repeatedly(encoder, lambda: load.prepared, use), threads)
        return use.rate


def working_rate(encoder: ChunkEncoder, load: Load, seconds: float, *, threads: int, computing: int = 0) -> float:
    """Tokens/s of tokenising and encoding a chunk repeatedly, for `seconds`, in as many threads as a worker has.

    A ModelError if some of the texts can't be encoded. With the number of `computing` threads of a batch, the rate is
    that without other work on the machine, by CPU time.
    """
    with closing(_TimedUse(seconds)) as use:
        ready = Barrier(threads, action=use.start)

        def work() -> None:
            try:
                if isinstance(encoder.backend, WarmsThreads):
                    if encoder.backend.joins:
                        use.launcher.warm_up(encoder.backend)
                    with use.turn():
                        encoder.backend.warm_up_thread()
            except BaseException:
                ready.abort()  # or the other threads wait for ever
                raise
            ready.wait()
            _encode_repeatedly(encoder, lambda: _prepare(encoder, load.texts), use)

        _in_threads(work, threads)
        return use.cpu_rate(computing) if computing else use.rate


def tokenising_rate(encoder: ChunkEncoder, load: Load, seconds: float) -> float:
    """Tokens/s of preparing a chunk repeatedly, for `seconds`, while nothing else runs."""
    started, tokens = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < seconds:
        tokens += int(_prepare(encoder, load.texts).tokens.lengths.sum())
    return tokens / spent


class _TimedUse(DeviceUse):
    """Threads take turns on the device for some seconds, and for a batch at least; their tokens are counted."""

    def __init__(self, seconds: float) -> None:
        self._tokens = 0
        self._cpu_s = 0.0
        self._seconds = seconds
        self._device, self._counting = Lock(), Lock()
        self.launcher = Launcher(self._device)
        self.start()

    def close(self) -> None:
        """End the threads that begin and finish joined batches."""
        self.launcher.close()

    def start(self) -> None:
        self._started, self._began_cpu_s = time.perf_counter(), time.process_time()

    @property
    def rate(self) -> float:
        """Tokens/s until now."""
        return self._tokens / (time.perf_counter() - self._started)

    def cpu_rate(self, computing: int) -> float:
        """Tokens/s by CPU time, when the threads have ended.

        The threads lead, and so also do what one thread does alone. Where other work stops them, the rest compute more
        of a batch: it costs at least its part of all CPU time.
        """
        return self._tokens / max(self._cpu_s, (time.process_time() - self._began_cpu_s) / computing)

    def on_end(self, cpu_s: float) -> None:
        with self._counting:
            self._cpu_s += cpu_s

    def turn(self) -> AbstractContextManager[object]:
        return self._device

    def check_wanted(self) -> None:
        if self._tokens and time.perf_counter() - self._started >= self._seconds:
            raise Stopped

    def on_batch(self, tokens: int) -> None:
        with self._counting:
            self._tokens += tokens


def _load(encoder: ChunkEncoder, name: str, texts: Sequence[str]) -> Load:
    encoded = [text.encode() for text in texts]
    prepared = _prepare(encoder, encoded)
    order = np.random.default_rng(0).permutation(len(prepared.batches))
    pieces = [prepared.pieces[at] for at in order] if prepared.pieces else ()
    return Load(name, encoded, replace(prepared, batches=[prepared.batches[at] for at in order], pieces=pieces))


def _prepare(encoder: ChunkEncoder, texts: list[bytes]) -> Prepared:
    return encoder.prepare(ChunkInput(0, bytes([RecordKind.TEXT] * len(texts)), texts), encoder.own_options)


def _encode_repeatedly(encoder: ChunkEncoder, prepared: Callable[[], Prepared], use: _TimedUse) -> None:
    began = time.thread_time()
    try:
        while True:
            done = encoder.encode(prepared(), use, use.launcher)
            if done.errors:
                raise ModelError(f"a text to measure with can't be encoded: {done.errors[0].message}")
    except Stopped:
        use.on_end(time.thread_time() - began)


def _in_threads(function: Callable[[], None], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(function) for _ in range(threads)]:
            future.result()

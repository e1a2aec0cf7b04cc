"""Estimates the size and time of a job without queueing anything."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any, cast

from embedctl.chunk_files import ChunkFiles
from embedctl.common.processes import running
from embedctl.corpus.pieces import prompt_flags
from embedctl.corpus.records import Record
from embedctl.corpus.unique import UniqueIds
from embedctl.jobs.enqueue import job_spec
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.queueing.chunk_sizes import BYTES_PER_TOKEN, ReadAhead, groups_of
from embedctl.queueing.routing import with_chunk_size
from embedctl_config import keys
from embedctl_config.hardware import HardwareClass
from embedctl_config.outputs import Output
from embedctl_config.settings import Settings
from embedctl_config.wire import RecordKind

_COST = "counting equal texts takes 24 bytes for each record"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The size and time of a job that is not submitted.

    Attributes:
        unusable: records that would fail, as far as one can tell without the model.
        duplicates: records with the text of an earlier record.
        tokens: counted if the model's tokenizer is installed here (`exact`), otherwise estimated from the text's size.
        truncated: records longer than the model's maximum; None if unknown.
        text_bytes, vector_bytes, kept_bytes: bytes that Redis would hold; `vector_bytes` is None if the dimensions are
            unknown, or sparse vectors are asked for, whose weights only the model can count. Kept fields are held twice
            for a moment, beside the text and beside the vectors.
        seconds: by the measured rates of the live workers; None if there are none.
        workers: live ones; None if there is no Redis to ask.
        chunks: how many the live workers would get, each of at most `chunk_size` records and `chunk_bytes` of text and
            kept fields.
    """

    hardware: str
    records: int
    unusable: int
    duplicates: int
    tokens: int
    exact: bool
    truncated: int | None
    text_bytes: int
    vector_bytes: int | None
    seconds: float | None
    workers: int | None
    kept_bytes: int = 0
    chunks: int = 0
    chunk_size: int = 0
    chunk_bytes: int = 0

    def describe(self) -> str:
        truncated = (
            "unknown: the model's tokenizer is not installed here" if self.truncated is None else f"{self.truncated:,}"
        )
        nobody = "no Redis was asked" if self.workers is None else "no worker serves the model"
        nobody = "only the model can count the weights of sparse vectors" if self.workers else nobody
        vectors = f"unknown: {nobody}" if self.vector_bytes is None else f"{self.vector_bytes:,} bytes"
        time = "unknown: no live worker has measured its rate" if self.seconds is None else _duration(self.seconds)
        facts = [
            ("class", self.hardware),
            ("records", f"{self.records:,}"),
            ("chunks", f"{self.chunks:,}, of at most {self.chunk_size:,} records and {self.chunk_bytes:,} bytes"),
            ("unusable", f"{self.unusable:,}"),
            ("duplicates", f"{self.duplicates:,}"),
            ("tokens", f"{self.tokens:,}" if self.exact else f"about {self.tokens:,}"),
            ("truncated", truncated),
            ("in Redis", f"{self.text_bytes:,} bytes of text at most"),
            *([("kept", f"{self.kept_bytes:,} bytes beside the vectors")] if self.kept_bytes else []),
            ("vectors", vectors),
            ("workers", "no Redis was asked" if self.workers is None else f"{self.workers} live"),
            ("time", time),
        ]
        return "\n".join(f"{name:<10} {value}" for name, value in facts)


def local_estimate(settings: Settings, records: Iterable[Record], options: SubmitOptions) -> Estimate:
    """As :func:`estimate`, without a Redis; `options` name a hardware class."""
    nobody = SimpleNamespace(alive=list, offers=dict, count=lambda _: None)
    # As much of a broker as an estimate looks at.
    no_broker = SimpleNamespace(settings=settings, workers=nobody, chunk_files=ChunkFiles(), remote=None)
    return estimate(cast("Broker", no_broker), records, options)


def estimate(broker: Broker, records: Iterable[Record], options: SubmitOptions, *, at_hand: bool = False) -> Estimate:
    """Read a corpus once and estimate a job of it. Memory does not grow with the corpus. `at_hand` and the errors are
    as for :func:`submit`."""
    ahead = ReadAhead(records, at_hand=at_hand)
    spec = with_chunk_size(broker.settings, broker.workers, job_spec(broker, options), ahead)
    rows, size = spec.options["chunk_size"], spec.options["chunk_bytes"]
    hardware, model = spec.hardware, spec.model
    served = [row.models[model] for row in broker.workers.alive() if row.hardware == hardware and model in row.models]
    chunks = total = usable = text_bytes = kept_bytes = 0
    with UniqueIds(0, cost=_COST) as texts, _counting(model, options) as counter:
        for chunks, group in enumerate(groups_of(ahead, max_rows=rows, max_bytes=size), 1):  # noqa: B007
            total += len(group)
            text_bytes += sum(len(record.text) for record in group)
            kept_bytes += sum(len(record.kept or b"") for record in group)
            for text in filter(bytes.strip, (each.text for each in group if each.kind is RecordKind.TEXT)):
                usable += 1
                texts.add_digest(hashlib.blake2b(text, digest_size=16).digest(), usable)
                counter.add((options.prompt or "").encode() + text)
        counted = counter.result()
        texts.find()
    tokens = counted["tokens"] if counted else round(text_bytes / BYTES_PER_TOKEN)
    dim = options.dimensions or (served[0].dim if served else counted["dim"] if counted else 0)
    lengths = {Output.DENSE: (total, dim), Output.MULTI: (tokens, served[0].multi_width if served else 0)}
    component = 2 if broker.settings.classes.get(hardware, HardwareClass()).stores_float16 else 4
    rate = sum(each.tokens_per_s for each in served)
    return Estimate(
        hardware=hardware,
        records=total,
        unusable=total - usable,
        duplicates=texts.count,
        tokens=tokens,
        exact=counted is not None,
        truncated=counted["truncated"] if counted else None,
        text_bytes=text_bytes,
        kept_bytes=kept_bytes,
        vector_bytes=_bytes(component, [lengths.get(output, (0, 0)) for output in options.outputs]),
        seconds=tokens / rate if rate else None,
        workers=broker.workers.count(keys.queue(hardware, model)),
        chunks=chunks,
        chunk_size=rows,
        chunk_bytes=size,
    )


def _bytes(component: int, lengths: Sequence[tuple[int, int]]) -> int | None:
    """What vectors take by their numbers and lengths; None if a length is 0, because it is unknown."""
    return component * sum(map(math.prod, lengths)) if all(length for _, length in lengths) else None


@contextmanager
def _counting(model: str, options: SubmitOptions) -> Iterator[_TokenCounter]:
    command = [sys.executable, "-m", "embedctl_workers.commands.count", model]
    command += ["--windows"] if options.long == "mean" else []
    command += prompt_flags(options.prompt, options.prompt_name)
    pipe = subprocess.PIPE
    with running(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        yield _TokenCounter(process)


class _TokenCounter:
    """Counts tokens in a child process. The child may load a tokenizer; the producer must not."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def add(self, text: bytes) -> None:
        stream: IO[bytes] | None = self._process.stdin
        if stream is None or stream.closed:
            return
        try:
            stream.write(struct.pack("<I", len(text)) + text)
        except BrokenPipeError:  # the child ended: it has no tokenizer for this model
            self._process.stdin = None

    def result(self) -> dict[str, Any] | None:
        """Tokens, truncated records and the vectors' dimensions; None if the child could not count."""
        try:
            out, _ = self._process.communicate()
        except BrokenPipeError:
            return None
        return json.loads(out) if self._process.returncode == 0 else None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"

"""The probe of `--sync` of a file: what it takes to compare a corpus with an earlier output of as many records."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from benchmarks.ours.service import Figures

from embedctl.corpus.digests import as_rows, digest_of
from embedctl.corpus.records import Record
from embedctl.destinations.interface import Contract
from embedctl.destinations.parquet import ParquetWriter
from embedctl.destinations.writer import Content
from embedctl.sync.comparison import compare_texts
from embedctl.sync.earlier import open_earlier
from embedctl.waiting.results import ChunkVectors
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.wire import RecordKind

_GROUP = 50_000
_OPTIONS = {"prompt": None, "truncation": "truncate", "normalize": True}


def since_scale(*, records: int = 1_000_000, changed: float = 0.01) -> Figures:
    """Comparing a corpus with an earlier output: time and memory. A share of the texts is new, the order the opposite.

    Each step has a new process, so that the peak is that of comparing.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "earlier.parquet")
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
            processes.submit(write_earlier, path, records).result()
            return processes.submit(measure, path, records, changed).result()


def write_earlier(path: Path, records: int) -> None:
    """An earlier output, with vectors of one component: they are not looked at."""
    about = Contract(job_fingerprint("ab" * 32, _OPTIONS), "model", "fp32", _OPTIONS, model_fingerprint="ab" * 32)
    writer = ParquetWriter(Content(path, records, about=lambda: about))
    for first in range(0, records, _GROUP):
        at = range(first, min(records, first + _GROUP))
        some = [Record(RecordKind.TEXT, _text(each), f"id-{each}") for each in at]
        vectors, digests = np.zeros((len(at), 1), np.float32), as_rows(b"".join(map(digest_of, some)))
        writer.write(ChunkVectors(np.array(at), [each.id for each in some], vectors, [], [], digests=digests))
    writer.finish()


def measure(path: Path, records: int, changed: float) -> Figures:
    """Compare."""
    before, began = _peak_mb(), time.monotonic()
    earlier = open_earlier(path, None)
    difference = compare_texts([] if earlier is None else [earlier], corpus(records, changed))
    seconds = time.monotonic() - began
    return {
        "unchanged": difference.unchanged,
        "to encode": difference.to_encode,
        "s": seconds,
        "records/s": records / seconds,
        "peak MB": _peak_mb(),
        "peak MB of the imports": before,
    }


def corpus(records: int, changed: float) -> Iterator[Record]:
    """The same records, in the opposite order, with a share of new texts."""
    step = round(1 / changed) if changed else records + 1
    for at in reversed(range(records)):
        text = _text(at) + b" changed" if at % step == 0 else _text(at)
        yield Record(RecordKind.TEXT, text, f"id-{at}")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _text(at: int) -> bytes:
    return b"text %d" % at

"""The probe of `--sync` of a file: what it takes to compare a corpus with an earlier output of as many records."""

from __future__ import annotations

import hashlib
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.ours.service import Figures

from embedctl.changes.cache import Hits
from embedctl.changes.opening import open_earlier
from embedctl.changes.plan import compare
from embedctl.destinations.about import ABOUT, About
from embedctl.records import Record
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.wire import RecordKind

_GROUP = 50_000
_OPTIONS = {"prompt": None, "truncation": "truncate", "normalize": True}
_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("id", pa.string()),
        ("embedding", pa.list_(pa.float32(), 1)),
        ("error_code", pa.string()),
        ("tokens_used", pa.int32()),
        ("tokens_lost", pa.int32()),
        ("text_sha256", pa.binary(32)),
    ]
)


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
    about = About(job_fingerprint("ab" * 32, _OPTIONS), "ab" * 32, "model", "fp32", _OPTIONS)
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd", use_dictionary=False) as writer:
        for first in range(0, records, _GROUP):
            at = range(first, min(records, first + _GROUP))
            nulls = [None] * len(at)
            columns = [
                list(at),
                [f"id-{each}" for each in at],
                [[0.0]] * len(at),
                *(nulls, nulls, nulls),
                [hashlib.sha256(_text(each)).digest() for each in at],
            ]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA))
        writer.add_key_value_metadata({ABOUT: about.text})


def measure(path: Path, records: int, changed: float) -> Figures:
    """Compare."""
    before, began = _peak_mb(), time.monotonic()
    plan = compare(corpus(records, changed), open_earlier(path, None), None, Hits(), copies=True)
    seconds = time.monotonic() - began
    return {
        "unchanged": plan.unchanged,
        "to encode": plan.to_encode,
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

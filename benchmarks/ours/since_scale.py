"""What it takes to compare a corpus with an earlier output of as many records: time, and the most memory.

python -m benchmarks.ours.since_scale --records 10000000 --changed 0.01
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from embedctl.changes.cache import Hits
from embedctl.changes.opening import open_earlier
from embedctl.changes.plan import compare
from embedctl.output.about import ABOUT, About
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


def corpus(records: int, changed: float) -> Iterator[Record]:
    """The same records, in the opposite order, with a share of new texts."""
    step = round(1 / changed) if changed else records + 1
    for at in reversed(range(records)):
        text = _text(at) + b" changed" if at % step == 0 else _text(at)
        yield Record(RecordKind.TEXT, text, f"id-{at}")


def measure(path: Path, records: int, changed: float) -> None:
    """Compare, and print what that took; the process is new, so its peak is that of comparing."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.monotonic()
    plan = compare(corpus(records, changed), open_earlier(str(path), None), [], None, Hits(), copies=True)
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{records:,} records: {plan.unchanged:,} unchanged, {plan.to_encode:,} to encode, {len(plan.gone):,} gone")
    print(
        f"{seconds:,.1f} s, {records / seconds:,.0f} records/s; {peak:,.0f} MB at most, of which {before:,.0f} imports"
    )


def main() -> None:
    """Write the earlier output, and compare in another process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--changed", type=float, default=0.01, help="the share of new texts")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "earlier.parquet")
        context = get_context("spawn")
        for target, arguments in (
            (write_earlier, (path, chosen.records)),
            (measure, (path, chosen.records, chosen.changed)),
        ):
            process = context.Process(target=target, args=arguments)
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)


def _text(at: int) -> bytes:
    return b"text %d" % at


if __name__ == "__main__":
    main()

"""The probe of `--sync`: what it takes to compare a corpus with a table of as many records."""

from __future__ import annotations

import hashlib
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from benchmarks.ours.service import Figures
from tests.support.databases import postgres_server

from embedctl.corpus.records import Record
from embedctl.destinations.interface import Batch, Contract, Destination
from embedctl.destinations.registry import destination_of
from embedctl.sync.comparison import Limit, compare, delete_missing
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.settings import Settings
from embedctl_config.wire import RecordKind

_OPTIONS = {"prompt": None, "truncation": "truncate", "normalize": True}


def sync_scale(*, records: int = 1_000_000, changed: float = 0.01) -> Figures:
    """Comparing a corpus with a table of PostgreSQL: time and memory. A share of the texts is new, the order the
    opposite. The same share of rows, whose ids the corpus lacks, is deleted.

    Each step has a new process, so that the peak is that of comparing.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(processes := ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1))
        url = stack.enter_context(postgres_server(Path(folder))) + "&table=docs"
        processes.submit(write_table, url, records, changed).result()
        return processes.submit(measure, url, records, changed).result()


def write_table(url: str, records: int, changed: float) -> None:
    """A table with vectors of one component, which are not read, and rows that no corpus has."""
    table = destination_of(url, Settings())
    table.open(_contract(1))
    wanted = ((f"id-{at}", _text(at)) for at in range(records))
    gone = ((f"gone-{at}", _text(at)) for at in range(int(changed * records)))
    rows = chain(wanted, gone)
    while some := list(islice(rows, table.batch_records)):
        digests = [hashlib.sha256(text).digest() for _, text in some]
        vectors = np.zeros((len(some), 1), np.float32)
        table.write(Batch([label for label, _ in some], vectors, list(_contract(1).sources(digests))))
    table.close()
    _vacuum(url.replace("&table=docs", ""))


def _vacuum(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE docs")


def measure(url: str, records: int, changed: float) -> Figures:
    """List all rows, compare, and delete the rows that the corpus lacks."""
    before, began, table = _peak_mb(), time.monotonic(), destination_of(url, Settings())
    rows = sum(1 for _ in _opened(table).ids())
    listed = time.monotonic()
    with compare(table, _contract(0), corpus(records, changed)) as difference:
        compared = time.monotonic()
        deleted = delete_missing(_opened(table), difference, Limit(rows))
        table.close()
        return {
            "unchanged": difference.unchanged,
            "to encode": difference.to_encode,
            "deleted": deleted,
            "s, to list all ids and sources": listed - began,
            "s, to compare": compared - listed,
            "s, to delete": time.monotonic() - compared,
            "CPU s": time.process_time(),
            "peak MB": _peak_mb(),
            "peak MB of the imports": before,
        }


def corpus(records: int, changed: float) -> Iterator[Record]:
    """The same records, in the opposite order, with a share of new texts."""
    step = round(1 / changed) if changed else records + 1
    for at in reversed(range(records)):
        text = _text(at) + b" changed" if at % step == 0 else _text(at)
        yield Record(RecordKind.TEXT, text, f"id-{at}")


def _opened(table: Destination) -> Destination:
    table.open(_contract(0))
    return table


def _contract(dim: int) -> Contract:
    model = "ab" * 32
    return Contract(job_fingerprint(model, _OPTIONS), "model", "fp32", _OPTIONS, dim, model_fingerprint=model)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _text(at: int) -> bytes:
    return b"text %d" % at

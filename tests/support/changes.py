"""Corpora that change, and what commands with `--sync` and `--cache` make of them."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from tests.support.databases import Database
from tests.support.forked import run_forked
from tests.support.jobs import reference
from tests.support.prepared import DieAt, InTurn, Put, Step
from tests.support.workers import CONFIG, StartWorker

if TYPE_CHECKING:
    from tests.support.here import Here

#: Blocks of a hundred records rather than a thousand, so that a small corpus has several.
SMALL_BLOCKS = Put({("embedctl.sync.merged", "BLOCK"): 100})
#: The next command does not wait for half a minute until the lease of a killed producer lapses.
SHORT_LEASE = Put({("embedctl_config.keys", "PRODUCER_LEASE_S"): 1})
#: Options with which vectors are others → what is said of vectors without them. The class `reseeded` is
#: :data:`RESEEDED`.
OTHER_VECTORS = {
    ("--prompt", "query: "): "another prompt",
    ("--no-normalize",): "another normalize",
    ("--long", "mean"): "another way with long texts",
    ("--dims", "8"): "another dimensions",
    ("--vectors", "dense,sparse"): "another kind of vectors",
    ("--class", "half"): "fp32, not fp16",
    ("--class", "reseeded"): "other weights",
}
RESEEDED = '\n[classes.reseeded]\nbackend = "dummy"\noptions = {dim = 16, seed = 1}\n'
#: The usual configuration, but that the class `dummy` has other weights.
OTHER_WEIGHTS = CONFIG.replace("options = {dim = 16}", "options = {dim = 16, seed = 1}", 1)
#: Deletes up to half of a table, because in a small corpus a few records are more than the usual tenth.
DELETE = ("--delete", "--delete-at-most", "50%")

#: Texts by id.
Documents = dict[str, Any]
Write = Callable[..., str]
#: Runs a command until it is killed before or after one of its steps.
Kill = Callable[..., None]


def writer(folder: Path) -> Write:
    """What writes a corpus of ids and texts, each with the same other fields, and returns its name."""

    def write(documents: Documents, name: str = "corpus.jsonl", **fields: Any) -> str:
        lines = ({"id": label, "text": text, **fields} for label, text in documents.items())
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return name

    return write


def many(count: int = 3000) -> Documents:
    return {f"id-{at}": f"text {at}" for at in range(count)}


def changed(documents: Documents) -> Documents:
    """One percent is changed, one record is gone, one is new, and the order is another one."""
    after = {
        label: f"{text} changed" if at % 100 == 5 else text
        for at, (label, text) in enumerate(documents.items())
        if label != "id-7"
    }
    return {"new": "a new text", **dict(reversed(after.items()))}


def assert_holds(path: Path, documents: Documents, seed: int = 0) -> None:
    """A file has exactly the vectors and digests of these documents, in their order."""
    table = pq.read_table(path)
    assert table["id"].to_pylist() == list(documents)
    assert table["position"].to_pylist() == list(range(len(documents)))
    digests = [hashlib.sha256(text.encode()).digest() for text in documents.values()]
    assert table["text_sha256"].to_pylist() == digests
    expected = reference(list(documents.values()), seed=seed)
    np.testing.assert_array_equal(np.stack(table["embedding"].to_numpy()), expected)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a command that succeeded says with --json."""
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def submitted(
    here: Here, documents: Documents, *options: str, prepare: Callable[[], None] | None = None
) -> dict[str, Any]:
    """What `submit` says of a corpus of these documents."""
    return told(here.embedctl("submit", here.write(documents), *options, "--json", prepare=prepare))


def counts(facts: dict[str, Any]) -> tuple[int, int, int]:
    return facts["unchanged"], facts["cached"], facts["encoded"]


@contextmanager
def worker_later(start_worker: StartWorker) -> Iterator[None]:
    """A worker starts while the block runs, and nothing tells before that which files its model has."""
    late = threading.Timer(2.0, start_worker, kwargs={"wait": False})
    late.start()
    try:
        yield
    finally:
        late.join()


def killer(environment: dict[str, str], folder: Path, *prepare: Callable[[], None]) -> Kill:
    """What runs a command until it is killed `before` or `after` a step. It fails if that did not happen."""

    def kill(step: Step, when: str, *arguments: str) -> None:
        done = run_forked(arguments, environment, folder, prepare=InTurn((SHORT_LEASE, *prepare, DieAt(step, when))))
        assert done.returncode == -signal.SIGKILL, f"it did not come to {step}: {done.stdout}{done.stderr}"

    return kill


@dataclass
class Nights:
    """A table that `submit --sync` makes what a corpus says, night after night."""

    here: Here
    table: Database

    def command(self, *options: str) -> tuple[str, ...]:
        return "submit", "corpus.jsonl", "-o", self.table.url, "--sync", "--json", *options

    def run(self, documents: Documents, *options: str) -> subprocess.CompletedProcess[str]:
        """Write the corpus, and sync."""
        self.here.write(documents)
        return self.here.embedctl(*self.command(*options))

    def synced(self, documents: Documents, *options: str) -> tuple[int, int, int | None]:
        """What a night did that succeeded: the rows left as they were, those written, and those deleted."""
        return did(told(self.run(documents, *options)))

    def kill(self, documents: Documents, step: Step, when: str, *options: str) -> None:
        """A night that is killed before or after a step."""
        self.here.write(documents)
        killer(self.here.environment, self.here.folder)(step, when, *self.command(*options))

    def assert_holds(self, documents: Documents) -> None:
        """The table has exactly the vectors of these documents."""
        rows = self.table.rows()
        assert sorted(rows) == sorted(documents)
        found = np.array([rows[label][0] for label in documents])
        np.testing.assert_allclose(found, reference(list(documents.values())), rtol=0, atol=1e-6)


def did(facts: dict[str, Any]) -> tuple[int, int, int | None]:
    return facts["delivered"]["unchanged"], facts["delivered"]["written"], facts["deleted"]


def next_day(documents: Documents) -> Documents:
    """One is changed, one is new and one is gone."""
    after = {label: text for label, text in documents.items() if label != "id-7"}
    return {**after, "id-3": "changed", "new": "a new text"}

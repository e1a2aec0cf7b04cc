"""`--sync` of a file and `--cache`: what is new or changed is encoded, and the rest is copied. The bytes are those of a
full run, also if a command was killed between any two of its steps."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedctl import Job, enqueue_embeddings
from tests.support.changes import (
    OTHER_VECTORS,
    OTHER_WEIGHTS,
    RESEEDED,
    SMALL_BLOCKS,
    assert_holds,
    changed,
    counts,
    killer,
    many,
    submitted,
    told,
    worker_later,
)
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.prepared import Step


def synced(folder: Path) -> tuple[str, ...]:
    """Options with which the earlier output `old.parquet`, under another name, becomes what the corpus says."""
    shutil.copy(folder / "old.parquet", folder / "new.parquet")
    return "--sync", "-o", "new.parquet"


#: All vectors of one pass.
ALL = ("--vectors", "dense,sparse,multi")


@pytest.mark.parametrize(
    ("suffix", "vectors"), [("parquet", ()), ("npy", ()), ("parquet", ALL), ("parquet", ("--vectors", "multi"))]
)
def test_the_output_is_that_of_a_full_run_and_an_unchanged_corpus_makes_no_job(
    here: Here, suffix: str, vectors: tuple[str, ...]
) -> None:
    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in here.folder.glob("v.*")}

    here.start_worker()
    before, sync = many(300), ("--sync", "-o", f"v.{suffix}", *vectors)
    assert counts(submitted(here, before, *sync)) == (0, 0, 300), "there is no file yet"
    first, jobs = files(), here.broker.jobs.newest_ids(9)
    facts = submitted(here, before, *sync, prepare=SMALL_BLOCKS)
    assert (counts(facts), facts["id"]) == ((300, 0, 0), None)
    assert (files(), here.broker.jobs.newest_ids(9)) == (first, jobs)

    after = changed(before)
    assert counts(submitted(here, after, *sync, prepare=SMALL_BLOCKS)) == (296, 0, 4)
    submitted(here, after, "--sync", "-o", f"full.{suffix}", *vectors)
    assert (here.folder / f"v.{suffix}").read_bytes() == (here.folder / f"full.{suffix}").read_bytes()
    assert here.broker.jobs.newest_ids(9) == jobs
    if vectors:
        submitted(here, after, "-o", "plain.parquet", *vectors)
        assert pq.read_table(here.folder / "plain.parquet") == pq.read_table(here.folder / "v.parquet")
    elif suffix == "parquet":
        assert_holds(here.folder / "v.parquet", after)
    else:
        np.testing.assert_array_equal(np.load(here.folder / "v.npy"), reference(list(after.values())))


def test_other_vectors_are_neither_copied_nor_hits_of_a_cache(here: Here) -> None:
    with (here.folder / "embedctl.toml").open("a") as config:
        config.write(RESEEDED)
    for name in ("dummy", "half", "reseeded"):
        here.start_worker(name)
    corpus, cache = here.write(many(20)), ("--cache", "c.db", "--json")
    told(here.embedctl("submit", corpus, "-o", "old.parquet", *cache))
    for options, why in OTHER_VECTORS.items():
        done = here.embedctl("submit", corpus, *synced(here.folder), *cache, *options)
        assert counts(told(done)) == (0, 0, 20), options
        assert why in done.stderr


@pytest.mark.slow
def test_a_worker_with_other_weights_that_comes_later_makes_everything_be_encoded(here: Here) -> None:
    """Nothing tells the model's files before the job is claimed."""
    first = here.start_worker()
    documents = many(20)
    submitted(here, documents, "-o", "old.parquet")
    first.stop()
    (here.folder / "embedctl.toml").write_text(OTHER_WEIGHTS)
    documents["id-5"] = "changed"
    with worker_later(here.start_worker):
        done = here.embedctl("submit", here.write(documents), *synced(here.folder), "--json")
    assert counts(told(done)) == (0, 0, 20)
    assert "other model files" in done.stderr
    assert_holds(here.folder / "new.parquet", documents, seed=1)


def test_without_a_worker_an_unchanged_corpus_is_copied_on_trust(here: Here) -> None:
    worker = here.start_worker()
    submitted(here, many(20), "-o", "old.parquet")
    worker.stop()
    done = here.embedctl("submit", "corpus.jsonl", *synced(here.folder), "--json")
    assert counts(told(done)) == (20, 0, 0)
    assert "on trust" in done.stderr
    assert (here.folder / "new.parquet").read_bytes() == (here.folder / "old.parquet").read_bytes()


def test_a_failed_text_is_encoded_again_and_other_fields_are_new(here: Here) -> None:
    here.start_worker("small")
    documents = {"a": "one", "b": "word " * 200, "c": "one", "d": ""}
    options = ("--class", "small", "--keep", "title", "--json")
    here.embedctl("submit", here.write(documents, title="old"), "-o", "old.parquet", *options, status=3)
    again = here.embedctl("submit", here.write(documents, title="new"), *synced(here.folder), *options, status=3)
    assert counts(json.loads(again.stdout)) == (2, 0, 2)
    table = pq.read_table(here.folder / "new.parquet")
    assert table["title"].to_pylist() == ["new"] * 4
    assert table.drop_columns(["title"]) == pq.read_table(here.folder / "old.parquet").drop_columns(["title"])


def test_records_without_ids_and_equal_ids_are_compared_by_their_texts(here: Here) -> None:
    here.start_worker()
    (here.folder / "c.jsonl").write_text("".join(f'{{"text": "text {at % 3}", "id": "same"}}\n' for at in range(6)))
    (here.folder / "c.txt").write_text("text 0\ntext 1\ntext 2\ntext 0\n")
    for corpus, texts in (("c.jsonl", 6), ("c.txt", 4)):
        told(here.embedctl("submit", corpus, "-o", "old.parquet", "--json"))
        facts = told(here.embedctl("submit", corpus, *synced(here.folder), "--json"))
        assert counts(facts) == (texts, 0, 0)
        assert (here.folder / "new.parquet").read_bytes() == (here.folder / "old.parquet").read_bytes()
    (here.folder / "c.txt").write_text("text 0\ntext 5\n")
    assert counts(told(here.embedctl("submit", "c.txt", *synced(here.folder), "--json"))) == (1, 0, 1)


def test_what_can_not_be_done_is_refused_before_anything_is_queued(here: Here) -> None:
    here.start_worker()
    submitted(here, many(5), "-o", "old.npy")
    job = enqueue_embeddings(["one"], settings=here.settings)
    here.embedctl("fetch", job.id, "-o", "plain.parquet", status=0)
    before = here.broker.jobs.newest_ids(9)
    for words, options in (
        ("has no digests", ["--sync", "-o", "plain.parquet"]),
        ("name it with -o", ["--sync"]),
        ("parts stay as one job has written them", ["--sync", "-o", "parts/"]),
        ("no room for digests", ["--sync", "-o", "new.jsonl"]),
        ("--limit", ["--sync", "--limit", "2", "-o", "old.npy"]),
        ("omit --delete", ["--sync", "--delete", "-o", "old.npy"]),
        ("--delete goes with --sync", ["--delete", "-o", "old.npy"]),
        ("stores float32", ["--sync", "--dtype", "float16", "-o", "old.npy"]),
    ):
        done = here.embedctl("submit", "corpus.jsonl", *options)
        assert done.returncode in (1, 2), done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    piped = here.embedctl("submit", "-", "--sync", "-o", "old.npy", stdin='{"text": "a"}\n')
    assert "save it to a file" in piped.stderr
    (here.folder / "old.digests.bin").write_bytes(bytes(5 * 32))
    assert "not the file that was written" in here.embedctl("submit", "corpus.jsonl", "--sync", "-o", "old.npy").stderr
    assert here.broker.jobs.newest_ids(9) == before


def test_any_job_of_the_command_line_is_fetched_with_digests(here: Here) -> None:
    here.start_worker()
    documents = many(20)
    job = submitted(here, documents, "--wait")["id"]
    for name in ("a.parquet", "a.npy", "a.jsonl"):
        here.embedctl("fetch", job, "-o", name, status=0)
    assert_holds(here.folder / "a.parquet", documents)
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in documents.values())
    assert (here.folder / "a.digests.bin").read_bytes() == digests
    assert set(json.loads((here.folder / "a.jsonl").read_text().splitlines()[0])) == {"position", "id", "embedding"}
    assert counts(submitted(here, documents, "--sync", "-o", "a.npy")) == (20, 0, 0)


def test_a_damaged_vector_is_not_copied(here: Here) -> None:
    here.start_worker()
    submitted(here, many(50), "-o", "old.parquet")
    file = here.folder / "old.parquet"
    column = pq.read_metadata(file).row_group(0).column(2)
    assert column.path_in_schema == "embedding.list.element"
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 10] ^= 1
    file.write_bytes(data)
    done = here.embedctl("submit", "corpus.jsonl", *synced(here.folder), status=1)
    assert "can't be read" in done.stderr
    assert (here.folder / "new.parquet").read_bytes() == bytes(data)


@pytest.mark.slow
def test_a_dry_run_counts_what_is_to_be_encoded(here: Here) -> None:
    here.start_worker()
    documents = many(300)
    submitted(here, documents, "--sync", "-o", "old.parquet")
    sync = ("corpus.jsonl", *synced(here.folder), "--dry-run", "--json")
    jobs = here.embedctl("submit", *sync)
    assert told(jobs)["records"] == 0
    assert "300 records are unchanged" in jobs.stderr
    here.write(changed(documents))
    assert told(here.embedctl("run", *sync))["records"] == 4
    assert told(here.embedctl("submit", *sync, "--prompt", "query: "))["records"] == 300
    assert not here.broker.jobs.newest_ids(9)


@pytest.mark.slow
def test_run_alone_copies_too(here: Here) -> None:
    """With a private Redis and a worker of its own, which tells the model's fingerprint."""
    here.environment["EMBEDCTL_REDIS_URL"] = ""
    documents = many(30)
    command = ("run", here.write(documents), "--sync", "-o", "v.parquet", "--cache", "c.db", "--json")
    assert counts(told(here.embedctl(*command))) == (0, 0, 30)
    documents["id-3"] = "changed"
    here.write(documents)
    again = here.embedctl(*command)
    assert counts(told(again)) == (29, 0, 1)
    assert "trust" not in again.stderr
    assert_holds(here.folder / "v.parquet", documents)
    state = [file for file in (here.folder / "state").rglob("*") if file.is_file()]
    assert not state, "nothing is left of the private Redis"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_of_a_job_that_its_error_budget_ends_what_is_done_is_written_beside_all_copies(here: Here, suffix: str) -> None:
    here.start_worker("poison")
    documents: dict[str, Any] = many(40)
    options = ("--sync", "--class", "poison", "--chunk-size", "2")
    submitted(here, documents, "-o", f"v.{suffix}", *options)
    changes = {f"id-{at}": f"changed {at}" for at in range(10, 30)} | {"id-10": "fail-encoder", "id-11": "fail-encoder"}
    after = documents | changes
    failed = here.embedctl("submit", here.write(after), "-o", f"v.{suffix}", "--max-errors", "1", *options, status=1)
    assert "error budget" in failed.stderr
    assert not here.broker.jobs.newest_ids(9)
    copied = [label for label in documents if label not in changes]
    if suffix == "parquet":
        rows = pq.read_table(here.folder / "v.parquet").to_pylist()
        found = {row["id"]: row["embedding"] for row in rows}
        assert [row["position"] for row in rows] == [list(after).index(row["id"]) for row in rows]
    else:
        array = np.load(here.folder / "v.npy")
        found = {label: array[at] for at, label in enumerate(after) if not np.isnan(array[at]).any()}
    assert set(copied) <= found.keys()
    expected = reference([after[label] for label in copied])
    np.testing.assert_array_equal([found[label] for label in copied], expected)

    # What is missing counts as new the next time.
    documents = {label: text for label, text in after.items() if text != "fail-encoder"}
    facts = submitted(here, documents, "-o", f"v.{suffix}", *options)
    assert facts["unchanged"] + facts["encoded"] == len(documents)
    assert facts["unchanged"] >= len(copied)
    submitted(here, documents, "-o", f"full.{suffix}", *options)
    assert (here.folder / f"v.{suffix}").read_bytes() == (here.folder / f"full.{suffix}").read_bytes()


#: What was encoded for one output is not encoded for another.
CACHE = ("--cache", "c.db")


def test_what_was_encoded_once_comes_out_of_the_cache(here: Here) -> None:
    here.start_worker()
    documents = many(300)
    assert counts(submitted(here, documents, "-o", "a.parquet", *CACHE)) == (0, 0, 300)
    facts = submitted(here, documents, "-o", "b.parquet", *CACHE)
    assert (counts(facts), facts["id"]) == ((0, 300, 0), None)
    assert not list(here.broker.jobs.newest())
    assert (here.folder / "a.parquet").read_bytes() == (here.folder / "b.parquet").read_bytes()

    documents |= {f"other-{at}": f"other {at}" for at in range(10)}
    assert counts(submitted(here, documents, "-o", "a.parquet", "--sync", *CACHE)) == (300, 0, 10)
    submitted(here, documents, "-o", "c.npy", *CACHE)
    facts = submitted(here, documents, "-o", "d.parquet", "--cache", "sqlite:///c.db")
    assert counts(facts) == (0, 310, 0)
    assert_holds(here.folder / "d.parquet", documents)
    np.testing.assert_array_equal(np.load(here.folder / "c.npy"), reference(list(documents.values())))


def test_a_text_whose_vectors_of_all_kinds_are_cached_is_not_encoded(here: Here) -> None:
    """Whichever of them were asked for together."""
    here.start_worker()
    documents = many(50)

    def cached(vectors: str, output: str) -> tuple[int, int, int]:
        return counts(submitted(here, documents, "--vectors", vectors, "-o", output, *CACHE))

    assert cached("dense", "dense.npy") == (0, 0, 50)
    assert cached("dense,sparse", "both.npz") == (0, 0, 50), "the sparse ones were not there"
    assert cached("multi", "multi.parquet") == (0, 0, 50)
    first = {file.name: file.read_bytes() for file in here.folder.glob("*.*") if file.suffix in (".npy", ".npz")}
    for vectors, output in (
        ("dense", "dense.npy"),
        ("dense,sparse", "both.npz"),
        ("dense,sparse,multi", "all.parquet"),
    ):
        assert cached(vectors, output) == (0, 50, 0)
    assert first == {name: (here.folder / name).read_bytes() for name in first}
    (here.folder / "c.db").unlink()
    submitted(here, documents, *ALL, "-o", "new.parquet")
    assert pq.read_table(here.folder / "all.parquet") == pq.read_table(here.folder / "new.parquet")


def test_failed_texts_are_not_cached_and_what_was_cut_is_told_again(here: Here) -> None:
    here.start_worker()
    corpus = here.write({"a": "one", "b": "", "c": "word " * 600})
    for name, expected in (("a.parquet", (0, 0, 3)), ("b.parquet", (0, 2, 1))):
        done = here.embedctl("submit", corpus, "-o", name, *CACHE, "--json", status=3)
        assert counts(json.loads(done.stdout)) == expected
    first, second = (pq.read_table(here.folder / name) for name in ("a.parquet", "b.parquet"))
    assert first == second
    assert first["tokens_lost"].to_pylist()[2] > 0


@pytest.mark.slow
def test_without_a_worker_the_cache_is_not_read(here: Here) -> None:
    """Nothing tells which files the model has, until a worker claims the job."""
    worker = here.start_worker()
    submitted(here, many(20), "-o", "a.parquet", *CACHE)
    worker.stop()
    with worker_later(here.start_worker):
        done = here.embedctl("submit", "corpus.jsonl", "-o", "b.parquet", *CACHE, "--json")
    assert counts(told(done)) == (0, 0, 20)
    assert "no live worker tells" in done.stderr


def test_a_cache_that_takes_nothing_costs_no_vector(here: Here) -> None:
    """As on a full disk: the output is complete, and the command says what is missing."""
    here.start_worker()
    documents = many(20)
    submitted(here, {"a": "first"}, "-o", "a.parquet", *CACHE)
    with sqlite3.connect(here.folder / "c.db") as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON vectors BEGIN SELECT RAISE(ABORT, 'no room'); END")
    database.close()
    done = here.embedctl("submit", here.write(documents), "-o", "b.parquet", *CACHE, "--json")
    assert counts(told(done)) == (0, 0, 20)
    assert "not all of them are in the cache" in done.stderr
    assert_holds(here.folder / "b.parquet", documents)
    assert not list(here.broker.jobs.newest())


#: Steps: a module and a class, a function, and which of its calls.
STEPS = [
    ("embedctl.sync.merged", "compare_texts", 1),
    ("embedctl.waiting.submission:Submission", "add", 2),
    ("embedctl.waiting.submission:Submission", "seal", 1),
    ("embedctl.destinations.parquet:ParquetWriter", "write", 3),
    ("embedctl.destinations.parquet", "publish", 1),
    ("embedctl.sync.cache:Cache", "put", 1),
    ("embedctl.sync.cache:Cache", "_make_room", 1),
    ("embedctl.jobs.job:Job", "discard", 1),
]
#: Of an array: the files are published one after the other.
STEPS_OF_ARRAYS = [
    ("embedctl.destinations.npy:NpyWriter", "write", 3),
    ("embedctl_config.durable", "remove", 1),
    *(("embedctl_config.durable", "publish", count) for count in (1, 2, 3, 4)),
    ("embedctl.destinations.npy:NpyWriter", "_vouched", 1),
]
#: After these, the output is complete, or an array is no more whole, and nothing leads to the job any more.
LEAVE_A_JOB = ("remove", "publish", "put", "_make_room", "_vouched", "discard")
OPTIONS = ("--chunk-size", "4", "--cache", "c.db", "--json")


class Night:
    """The first night's output, and what the second one must make of it."""

    def __init__(self, here: Here, output: str, size: int = 250) -> None:
        self.here, self.folder, self.output = here, here.folder, output
        self._vectors = ALL if output.endswith(".parquet") else ()
        #: Larger than a block.
        self.documents = many(size)
        submitted(here, self.documents, "--sync", "-o", output, *self._vectors)
        del self.documents["id-1"], self.documents[f"id-{size * 4 // 5}"]
        self.changed = {f"id-{at}": f"changed {at}" for at in range(size // 25, size - size // 25, size * 2 // 25)}
        self.documents |= self.changed
        here.write(self.documents)
        self._first = here.folder / "first"
        self._first.mkdir()
        for file in self._files():
            shutil.copy(here.folder / file, self._first)
        told(self.again())
        self._expected = self._files()
        assert output in self._expected

    @property
    def command(self) -> tuple[str, ...]:
        return "submit", "corpus.jsonl", "--sync", "-o", self.output, *OPTIONS, *self._vectors

    def again(self) -> subprocess.CompletedProcess[str]:
        return self.here.embedctl(*self.command, prepare=SMALL_BLOCKS)

    def begin(self) -> None:
        """As after the first night."""
        for pattern in (f"{Path(self.output).stem}.*", f".{Path(self.output).stem}*", "c.db*"):
            for file in self.folder.glob(pattern):
                file.unlink()
        for file in self._first.iterdir():
            shutil.copy(file, self.folder)

    def assert_done(self) -> None:
        assert self._files() == self._expected
        assert not list(self.folder.glob(f".{Path(self.output).stem}*")), "nothing unfinished is left"

    def _files(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in self.folder.glob(f"{Path(self.output).stem}.*")}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("output", "steps"), [("v.parquet", STEPS), ("v.npy", STEPS_OF_ARRAYS)])
def test_an_output_survives_a_kill_at_any_step(here: Here, output: str, steps: Sequence[Step]) -> None:
    here.start_worker()
    night = Night(here, output)
    kill = killer(here.environment, here.folder, SMALL_BLOCKS)
    if output == "v.parquet":
        assert_holds(here.folder / output, night.documents)
    for step, when in [*((step, "before") for step in steps), (steps[-1], "after")]:
        night.begin()
        kill(step, when, *night.command)
        assert all(job.records <= len(night.changed) for job in here.broker.jobs.newest()), "nothing else is encoded"
        done = night.again()
        assert done.returncode == 0, (step, when, done.stderr)
        night.assert_done()
        left = list(here.broker.jobs.newest())
        assert not left or step[1] in LEAVE_A_JOB, (step, when)
        for job in left:
            Job(job.id, here.broker).discard()


@pytest.mark.slow
def test_two_at_once_make_one_output(here: Here) -> None:
    here.start_worker()
    night = Night(here, "v.parquet", 2500)  # so that they take long enough to meet
    night.begin()
    both = [Forked(night.command, here.environment, here.folder, prepare=SMALL_BLOCKS) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert 0 in [process.returncode for process in both], said
    assert "Traceback" not in "".join(said), said
    night.assert_done()
    assert counts(json.loads(night.again().stdout))[2] == 0
    night.assert_done()

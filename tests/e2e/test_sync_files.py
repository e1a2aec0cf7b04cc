"""`--sync` of a file encodes what is new or changed, and copies the rest: the bytes are those of a full run."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedctl import enqueue_embeddings
from tests.support.changes import (
    OTHER_VECTORS,
    OTHER_WEIGHTS,
    RESEEDED,
    SMALL_BLOCKS,
    assert_holds,
    changed,
    counts,
    many,
    submitted,
    told,
    worker_later,
)
from tests.support.here import Here
from tests.support.jobs import reference


def synced(folder: Path) -> tuple[str, ...]:
    """Options with which the earlier output `old.parquet`, under another name, becomes what the corpus says."""
    shutil.copy(folder / "old.parquet", folder / "new.parquet")
    return "--sync", "-o", "new.parquet"


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_the_output_is_that_of_a_full_run_and_an_unchanged_corpus_makes_no_job(here: Here, suffix: str) -> None:
    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in here.folder.glob("v.*")}

    here.start_worker()
    before, sync = many(300), ("--sync", "-o", f"v.{suffix}")
    submitted(here, before, "-o", f"v.{suffix}")
    first, jobs = files(), here.broker.jobs.newest_ids(9)
    facts = submitted(here, before, *sync, prepare=SMALL_BLOCKS)
    assert (counts(facts), facts["id"]) == ((300, 0, 0), None)
    assert (files(), here.broker.jobs.newest_ids(9)) == (first, jobs)

    after = changed(before)
    assert counts(submitted(here, after, *sync, prepare=SMALL_BLOCKS)) == (296, 0, 4)
    submitted(here, after, "--sync", "-o", f"full.{suffix}")
    assert (here.folder / f"v.{suffix}").read_bytes() == (here.folder / f"full.{suffix}").read_bytes()
    if suffix == "parquet":
        assert_holds(here.folder / "v.parquet", after)
    else:
        np.testing.assert_array_equal(np.load(here.folder / "v.npy"), reference(list(after.values())))
    assert here.broker.jobs.newest_ids(9) == jobs


@pytest.mark.parametrize("verb", ["submit", "run"])
def test_every_night_the_same_command(here: Here, verb: str) -> None:
    """The first night, there is no file yet."""
    here.start_worker()
    documents = many(30)

    def night() -> tuple[int, int, int]:
        done = here.embedctl(verb, here.write(documents), "--sync", "-o", "vectors.parquet", "--json")
        assert_holds(here.folder / "vectors.parquet", documents)
        return counts(told(done))

    assert night() == (0, 0, 30)
    assert night() == (30, 0, 0)
    del documents["id-3"]
    documents |= {"id-4": "another text", "id-30": "new"}
    assert night() == (28, 0, 2)
    (here.folder / "vectors.parquet").unlink()
    assert night() == (0, 0, 30)


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
        (here.folder / "full.parquet").unlink(missing_ok=True)
        facts = told(here.embedctl("submit", corpus, "--sync", "-o", "full.parquet", *cache, *options))
        assert counts(facts) == (0, 20, 0), options
        assert (here.folder / "new.parquet").read_bytes() == (here.folder / "full.parquet").read_bytes(), options


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
    assert here.embedctl("fetch", job.id, "-o", "plain.parquet").returncode == 0
    before = here.broker.jobs.newest_ids(9)
    for words, options in (
        ("has no digests", ["--sync", "-o", "plain.parquet"]),
        ("name it with -o", ["--sync"]),
        ("name it with -o", ["--sync", "-o", "parts/"]),
        ("no room for digests", ["--sync", "-o", "new.jsonl"]),
        ("--limit", ["--sync", "--limit", "2", "-o", "old.npy"]),
        ("omit --delete", ["--sync", "--delete", "-o", "old.npy"]),
        ("--delete goes with --sync", ["--delete", "-o", "old.npy"]),
        ("stores float32", ["--sync", "--output-type", "float16", "-o", "old.npy"]),
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
        assert here.embedctl("fetch", job, "-o", name).returncode == 0
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

"""`--sync` of a file encodes what is new or changed, and copies the rest: the bytes are those of a full run."""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from embedctl import enqueue_embeddings
from embedctl.broker import Broker
from tests.support.changes import (
    OTHER_VECTORS,
    RESEEDED,
    SMALL_BLOCKS,
    Write,
    assert_holds,
    changed,
    counts,
    many,
    told,
    worker_later,
)
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.workers import CONFIG, StartWorker


def synced(folder: Path) -> tuple[str, ...]:
    """Options with which the earlier output `old.parquet`, under another name, becomes what the corpus says."""
    shutil.copy(folder / "old.parquet", folder / "new.parquet")
    return "--sync", "-o", "new.parquet"


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_an_unchanged_corpus_makes_no_job_and_the_same_bytes(
    suffix: str, write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    corpus = write(many(300))
    told(embedctl("submit", corpus, "-o", f"v.{suffix}", "--json"))
    (first,) = broker.jobs.newest()
    before = {file.name: file.read_bytes() for file in short_folder.glob("v.*")}
    facts = told(embedctl("submit", corpus, "--sync", "-o", f"v.{suffix}", "--json", prepare=SMALL_BLOCKS))
    assert counts(facts) == (300, 0, 0)
    assert facts["id"] is None
    assert [job.id for job in broker.jobs.newest()] == [first.id]
    assert {file.name: file.read_bytes() for file in short_folder.glob("v.*")} == before


@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_what_changed_is_encoded_and_the_output_is_that_of_a_full_run(
    suffix: str, write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    before = many(300)
    told(embedctl("submit", write(before), "--sync", "-o", f"v.{suffix}", "--json"))
    after = changed(before)
    corpus = write(after)
    facts = told(embedctl("submit", corpus, "--sync", "-o", f"v.{suffix}", "--json", prepare=SMALL_BLOCKS))
    assert counts(facts) == (296, 0, 4)
    told(embedctl("submit", corpus, "--sync", "-o", f"full.{suffix}", "--json"))
    assert (short_folder / f"v.{suffix}").read_bytes() == (short_folder / f"full.{suffix}").read_bytes()
    if suffix == "parquet":
        assert_holds(short_folder / "v.parquet", after)
    else:
        np.testing.assert_array_equal(np.load(short_folder / "v.npy"), reference(list(after.values())))
    assert not list(broker.jobs.newest())


def test_every_night_the_same_command(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    """The first night, there is no file yet."""
    start_worker()
    documents = many(30)

    def night() -> dict[str, Any]:
        done = embedctl("submit", write(documents), "--sync", "-o", "vectors.parquet", "--json")
        assert_holds(short_folder / "vectors.parquet", documents)
        return told(done)

    assert counts(night()) == (0, 0, 30)
    assert counts(night()) == (30, 0, 0)
    del documents["id-3"]
    documents |= {"id-4": "another text", "id-30": "new"}
    assert counts(night()) == (28, 0, 2)
    (short_folder / "vectors.parquet").unlink()
    assert counts(night()) == (0, 0, 30)


def test_other_vectors_are_not_copied(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    with (short_folder / "embedctl.toml").open("a") as config:
        config.write(RESEEDED)
    for name in ("dummy", "half", "reseeded"):
        start_worker(name)
    corpus = write(many(20))
    told(embedctl("submit", corpus, "-o", "old.parquet", "--json"))
    for options, why in OTHER_VECTORS.items():
        done = embedctl("submit", corpus, *synced(short_folder), "--json", *options)
        assert counts(told(done)) == (0, 0, 20), options
        assert why in done.stderr
        (short_folder / "full.parquet").unlink(missing_ok=True)
        told(embedctl("submit", corpus, "--sync", "-o", "full.parquet", "--json", *options))
        assert (short_folder / "new.parquet").read_bytes() == (short_folder / "full.parquet").read_bytes(), options


@pytest.mark.slow
def test_a_worker_with_other_weights_that_comes_later_makes_everything_be_encoded(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker, environment: dict[str, str]
) -> None:
    """Nothing tells the model's files before the job is claimed."""
    first = start_worker()
    documents = many(20)
    told(embedctl("submit", write(documents), "-o", "old.parquet", "--json"))
    first.stop()
    (short_folder / "embedctl.toml").write_text(
        CONFIG.replace("options = {dim = 16}", "options = {dim = 16, seed = 1}", 1)
    )
    documents["id-5"] = "changed"

    with worker_later(start_worker):
        done = embedctl("submit", write(documents), *synced(short_folder), "--json")
    assert counts(told(done)) == (0, 0, 20)
    assert "other model files" in done.stderr
    assert_holds(short_folder / "new.parquet", documents, seed=1)


def test_without_a_worker_an_unchanged_corpus_is_copied_on_trust(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    worker = start_worker()
    corpus = write(many(20))
    told(embedctl("submit", corpus, "-o", "old.parquet", "--json"))
    worker.stop()
    done = embedctl("submit", corpus, *synced(short_folder), "--json")
    assert counts(told(done)) == (20, 0, 0)
    assert "on trust" in done.stderr
    assert (short_folder / "new.parquet").read_bytes() == (short_folder / "old.parquet").read_bytes()


def test_a_failed_text_is_encoded_again_and_other_fields_are_new(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker("small")
    documents = {"a": "one", "b": "word " * 200, "c": "one", "d": ""}
    options = ("--class", "small", "--keep", "title", "--json")
    first = embedctl("submit", write(documents, title="old"), "-o", "old.parquet", *options)
    assert first.returncode == 3, first.stderr
    again = embedctl("submit", write(documents, title="new"), *synced(short_folder), *options)
    assert again.returncode == 3
    assert counts(json.loads(again.stdout)) == (2, 0, 2)
    table = pq.read_table(short_folder / "new.parquet")
    assert table["title"].to_pylist() == ["new"] * 4
    before = pq.read_table(short_folder / "old.parquet")
    assert table.drop_columns(["title"]) == before.drop_columns(["title"])


def test_records_without_ids_and_equal_ids_are_compared_by_their_texts(
    embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    (short_folder / "c.jsonl").write_text("".join(f'{{"text": "text {at % 3}", "id": "same"}}\n' for at in range(6)))
    (short_folder / "c.txt").write_text("text 0\ntext 1\ntext 2\ntext 0\n")
    for corpus, texts in (("c.jsonl", 6), ("c.txt", 4)):
        told(embedctl("submit", corpus, "-o", "old.parquet", "--json"))
        facts = told(embedctl("submit", corpus, *synced(short_folder), "--json"))
        assert counts(facts) == (texts, 0, 0)
        assert (short_folder / "new.parquet").read_bytes() == (short_folder / "old.parquet").read_bytes()
    (short_folder / "c.txt").write_text("text 0\ntext 5\n")
    facts = told(embedctl("submit", "c.txt", *synced(short_folder), "--json"))
    assert counts(facts) == (1, 0, 1)


def test_what_can_not_be_done_is_refused_before_anything_is_queued(
    write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    corpus = write(many(5))
    told(embedctl("submit", corpus, "-o", "old.npy", "--json"))
    job = enqueue_embeddings(["one"], settings=broker.settings)
    assert embedctl("fetch", job.id, "-o", "plain.parquet").returncode == 0
    before = len(list(broker.jobs.newest()))

    def refused(*arguments: str, stdin: str | None = None) -> str:
        done = embedctl("submit", *arguments, stdin=stdin)
        assert done.returncode in (1, 2), done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "has no digests" in refused(corpus, "--sync", "-o", "plain.parquet")
    assert "name it with -o" in refused(corpus, "--sync")
    assert "name it with -o" in refused(corpus, "--sync", "-o", "parts/")
    assert "no room for digests" in refused(corpus, "--sync", "-o", "new.jsonl")
    assert "save it to a file" in refused("-", "--sync", "-o", "old.npy", stdin='{"text": "a"}\n')
    assert "--limit" in refused(corpus, "--sync", "--limit", "2", "-o", "old.npy")
    assert "omit --delete" in refused(corpus, "--sync", "--delete", "-o", "old.npy")
    assert "--delete goes with --sync" in refused(corpus, "--delete", "-o", "old.npy")
    assert "stores float32" in refused(corpus, "--sync", "--output-type", "float16", "-o", "old.npy")
    (short_folder / "old.digests.bin").write_bytes(bytes(5 * 32))
    assert "not the file that was written" in refused(corpus, "--sync", "-o", "old.npy")
    assert len(list(broker.jobs.newest())) == before


def test_any_job_of_the_command_line_is_fetched_with_digests(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = many(20)
    done = embedctl("submit", write(documents), "--wait", "--json")
    job = told(done)["id"]
    for name in ("a.parquet", "a.npy", "a.jsonl"):
        assert embedctl("fetch", job, "-o", name).returncode == 0
    assert_holds(short_folder / "a.parquet", documents)
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in documents.values())
    assert (short_folder / "a.digests.bin").read_bytes() == digests
    assert set(json.loads((short_folder / "a.jsonl").read_text().splitlines()[0])) == {"position", "id", "embedding"}
    facts = told(embedctl("submit", "corpus.jsonl", "--sync", "-o", "a.npy", "--json"))
    assert counts(facts) == (20, 0, 0)


def test_a_damaged_vector_is_not_copied(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    corpus = write(many(50))
    told(embedctl("submit", corpus, "-o", "old.parquet", "--json"))
    file = short_folder / "old.parquet"
    column = pq.read_metadata(file).row_group(0).column(2)
    assert column.path_in_schema == "embedding.list.element"
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 10] ^= 1
    file.write_bytes(data)
    done = embedctl("submit", corpus, *synced(short_folder))
    assert done.returncode == 1
    assert "can't be read" in done.stderr
    assert (short_folder / "new.parquet").read_bytes() == bytes(data)


@pytest.mark.slow
def test_a_dry_run_counts_what_is_to_be_encoded(
    write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = many(300)
    told(embedctl("submit", write(documents), "--sync", "-o", "old.parquet", "--json"))
    sync = ("corpus.jsonl", *synced(short_folder), "--dry-run", "--json")
    facts = embedctl("submit", *sync)
    assert told(facts)["records"] == 0
    assert "300 records are unchanged" in facts.stderr
    write(changed(documents))
    assert told(embedctl("run", *sync))["records"] == 4
    facts = embedctl("submit", *sync, "--prompt", "query: ")
    assert told(facts)["records"] == 300
    assert not list(broker.jobs.newest())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_records_are_encoded_once(
    write: Write,
    embedctl: RunEmbedctl,
    broker: Broker,
    short_folder: Path,
    environment: dict[str, str],
    free_port: int,
    start_worker: StartWorker,
) -> None:
    """Counted by the worker itself."""
    environment["EMBEDCTL_METRICS_ADDRESS"] = str(free_port)
    start_worker(forked=False)

    def encoded() -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=120) as page:
            families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples]
        return int(sum(sample.value for sample in samples if sample.name == "embedctl_records_total"))

    documents = many(10_000)
    told(embedctl("submit", write(documents), "--sync", "-o", "old.parquet", "--json"))
    assert encoded() == 10_000
    facts = told(embedctl("submit", "corpus.jsonl", *synced(short_folder), "--json"))
    assert counts(facts) == (10_000, 0, 0)
    assert encoded() == 10_000
    assert not list(broker.jobs.newest())
    assert (short_folder / "old.parquet").read_bytes() == (short_folder / "new.parquet").read_bytes()

    after = {label: text if at % 100 else f"{text} changed" for at, (label, text) in enumerate(documents.items())}
    told(embedctl("submit", write(after), *synced(short_folder), "--json"))
    assert encoded() == 10_100
    told(embedctl("submit", "corpus.jsonl", "--sync", "-o", "full.parquet", "--json"))
    assert encoded() == 20_100
    assert (short_folder / "full.parquet").read_bytes() == (short_folder / "new.parquet").read_bytes()
    assert_holds(short_folder / "new.parquet", after)


def test_run_copies_too(write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker) -> None:
    start_worker()
    documents = many(30)
    command = ("run", write(documents), "--sync", "-o", "v.parquet", "--json")
    assert counts(told(embedctl(*command))) == (0, 0, 30)
    documents["id-3"] = "changed"
    write(documents)
    assert counts(told(embedctl(*command))) == (29, 0, 1)
    assert counts(told(embedctl(*command))) == (30, 0, 0)
    assert_holds(short_folder / "v.parquet", documents)


@pytest.mark.slow
def test_run_alone_copies_too(write: Write, embedctl: RunEmbedctl, short_folder: Path) -> None:
    """With a private Redis and a worker of its own, which tells the model's fingerprint."""
    documents = many(30)
    command = ("run", write(documents), "--sync", "-o", "v.parquet", "--cache", "c.db", "--json")
    assert counts(told(embedctl(*command, EMBEDCTL_REDIS_URL=""))) == (0, 0, 30)
    documents["id-3"] = "changed"
    write(documents)
    again = embedctl(*command, EMBEDCTL_REDIS_URL="")
    assert counts(told(again)) == (29, 0, 1)
    assert "trust" not in again.stderr
    assert_holds(short_folder / "v.parquet", documents)
    state = [file for file in (short_folder / "state").rglob("*") if file.is_file()]
    assert not state, "nothing is left of the private Redis"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "npy"])
def test_of_a_job_that_its_error_budget_ends_what_is_done_is_written_beside_all_copies(
    suffix: str, write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker("poison")
    documents = many(40)
    options = ("--class", "poison", "--chunk-size", "2", "--json")
    told(embedctl("submit", write(documents), "--sync", "-o", f"v.{suffix}", *options))
    changes = {f"id-{at}": f"changed {at}" for at in range(10, 30)} | {"id-10": "fail-encoder", "id-11": "fail-encoder"}
    after = documents | changes
    sync = ("--sync", "-o", f"v.{suffix}")
    failed = embedctl("submit", write(after), *sync, "--max-errors", "1", *options)
    assert failed.returncode == 1
    assert "error budget" in failed.stderr
    assert not list(broker.jobs.newest())
    copied = [label for label in documents if label not in changes]
    if suffix == "parquet":
        rows = pq.read_table(short_folder / "v.parquet").to_pylist()
        found = {row["id"]: row["embedding"] for row in rows}
        assert [row["position"] for row in rows] == [list(after).index(row["id"]) for row in rows]
    else:
        array = np.load(short_folder / "v.npy")
        found = {label: array[at] for at, label in enumerate(after) if not np.isnan(array[at]).any()}
    assert set(copied) <= found.keys()
    expected = reference([after[label] for label in copied])
    np.testing.assert_array_equal([found[label] for label in copied], expected)

    # What is missing counts as new the next time.
    documents = {label: text for label, text in after.items() if text != "fail-encoder"}
    facts = told(embedctl("submit", write(documents), *sync, *options))
    assert facts["unchanged"] + facts["encoded"] == len(documents)
    assert facts["unchanged"] >= len(copied)
    told(embedctl("submit", "corpus.jsonl", "--sync", "-o", f"full.{suffix}", *options))
    assert (short_folder / f"v.{suffix}").read_bytes() == (short_folder / f"full.{suffix}").read_bytes()

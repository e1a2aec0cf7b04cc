"""`--long split`: a text that is too long becomes several records, each with its place in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedctl import enqueue_embeddings
from embedctl.cli import planning
from embedctl.corpus.rows import Rows
from embedctl.jobs.options import SubmitOptions
from embedctl_config.settings import Settings
from embedctl_workers.models.files import resolve_model
from tests.support.changes import Documents, Nights, told
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.passages import passages
from tests.support.references_here import expected_vectors, keep_references

MODEL = "all-MiniLM-L6-v2"
SPLIT = ("--long", "split", "--model", MODEL)
ALL = ("--delete", "--delete-at-most", "100%")
PROSE = passages(300)


def assert_are_the_pieces(found: Mapping[str, Mapping[str, Any]], documents: Documents) -> None:
    """Each id tells a piece's place, and the pieces of a text hold all of it but white space."""
    places: dict[str, list[tuple[int, int]]] = {label: [] for label in documents}
    for label, kept in found.items():
        assert label == f"{kept['parent']}#{kept['start']}"
        places[kept["parent"]].append((kept["start"], kept["end"]))
    for label, spans in places.items():
        at = 0
        for start, end in sorted(spans):
            assert start >= at
            assert not documents[label][at:start].strip()
            at = end
        assert not documents[label][at:].strip()


def test_a_changed_text_has_other_pieces_in_a_table(here: Here, nights: Nights) -> None:
    here.start_worker(model=MODEL)
    documents = {"a": "\n\n".join(PROSE[:150]), "b": "A short text.", "c": "\n".join(PROSE[150:200])}
    records = told(nights.run(documents, *SPLIT, "--dry-run"))["records"]
    assert nights.synced(documents, *SPLIT) == (0, records, None)
    assert records > 10
    before = assert_holds(nights, documents)

    after = {"a": f"Another beginning. {documents['a'][:-500]}", "b": documents["b"], "new": "\n".join(PROSE[200:])}
    refused = nights.run(after, *SPLIT, "--delete")
    assert refused.returncode == 1
    assert "nothing is deleted" in refused.stderr
    _, _, deleted = nights.synced(after, *SPLIT, *ALL)
    now = assert_holds(nights, after)
    assert deleted == len(before - now) > 10
    assert "b#0" in before & now
    assert nights.synced(after, *SPLIT, *ALL) == (len(now), 0, 0)
    assert nights.run(after, "--model", MODEL).returncode == 65, "whole texts are of another contract"


def assert_holds(nights: Nights, documents: Documents) -> set[str]:
    rows = nights.table.rows()
    assert_are_the_pieces({str(label): kept for label, (_, kept) in rows.items()}, documents)
    texts = [documents[kept["parent"]][kept["start"] : kept["end"]] for _, kept in rows.values()]
    found = np.array([vector for vector, _ in rows.values()])
    np.testing.assert_allclose(found, reference(texts), rtol=0, atol=1e-6)
    return set(map(str, rows))


def test_the_library_splits_too(here: Here) -> None:
    here.start_worker(model=MODEL)
    long, extra = "\n\n".join(PROSE[:100]), {"title": "T", "n": 1}
    job = enqueue_embeddings(
        [{"text": text, **extra} for text in (long, "short", "")],
        template="{title}: {text}!",
        keep=("n",),
        long="split",
        model=MODEL,
        settings=here.settings,
    )
    kept = [fields for chunk in job.iter_results(timeout=60) for fields in chunk.kept or ()]
    assert all(each["n"] == 1 for each in kept)
    assert [each["parent"] for each in kept[-2:]] == [1, 2], "positions, because no record has an id"
    assert_are_the_pieces({f"0#{each['start']}": each for each in kept[:-2]}, {0: long})  # type: ignore[dict-item]
    assert [error.code for error in job.errors()] == ["empty"]
    texts = [f"T: {long[each['start'] : each['end']]}!" for each in kept[:-2]]
    np.testing.assert_array_equal(job.vectors()[:-2], reference(texts))


def test_what_can_t_be_split_is_refused_beforehand(here: Here) -> None:
    here.write({"a": "one"})
    (here.folder / "b.jsonl").write_text('{"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "one"}}\n')
    for arguments, said in {
        ("corpus.jsonl", "--model", "no-such-model"): "no-such-model can't be used here",
        ("corpus.jsonl", "-o", "v.npy"): "can't hold the kept fields (parent, start, end)",
        ("corpus.jsonl", "--keep", "start"): "'start' is what comes out beside a piece",
        ("corpus.jsonl", "--template", "{id}"): "the template does not hold {text} once",
        ("b.jsonl",): "each input of a batch file has one vector",
    }.items():
        done = here.embedctl("submit", "--long", "split", *arguments, status=2)
        assert said in done.stderr
    assert not list(here.broker.jobs.newest())


def test_a_plan_counts_pieces(here: Here) -> None:
    path = str(here.folder / here.write({"a": "\n\n".join(PROSE), "b": "A short text."}))
    options = SubmitOptions.of(model=MODEL, hardware="cpu", long="split")
    counted, read, _ = planning._counted(Settings(), None, [path], Rows(10**6), options)
    assert read == 2
    assert counted.exact
    assert counted.truncated == 0
    assert 20 < counted.tokens / 256 < counted.records


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pieces_have_the_vectors_of_their_texts(here: Here) -> None:
    folder = resolve_model(MODEL).folder
    keep_references(folder, here.environment["EMBEDCTL_CACHE_DIR"])
    here.start_worker("cpu", model=MODEL)
    documents = {"a": "\n\n".join(PROSE), "b": "A short text."}
    command = ("submit", here.write(documents), "-o", "v.parquet", *SPLIT, "--class", "cpu", "--prompt", "query: ")
    done = here.embedctl(*command)
    rows = pq.read_table(here.folder / "v.parquet").to_pylist()
    assert f"2 records make {len(rows)} pieces" in done.stderr
    assert f"{len(rows)} vectors" in done.stderr
    assert "0 failed, 0 truncated" in done.stderr
    assert_are_the_pieces({row["id"]: row for row in rows}, documents)
    texts = [documents[row["parent"]][row["start"] : row["end"]] for row in rows]
    expected = expected_vectors(folder, texts, prompt="query: ")
    np.testing.assert_allclose(np.stack([row["embedding"] for row in rows]), expected, rtol=0, atol=1e-5)

"""What holds for every sink: records once, whatever is repeated; the resume point; whose vectors a table holds."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl.sinks import deliver as deliveries
from embedctl.sinks.base import Batch, Target, Verified
from embedctl.sinks.deletion import delete_all
from embedctl.sinks.deliver import write_and_commit
from embedctl.sinks.registry import sink_of
from embedctl_config.errors import MixedVectors, OutputError, SinkRefused, SinkUnavailable
from embedctl_config.retry import Policy
from embedctl_config.settings import Settings
from tests.support.forked import status_of_fork
from tests.support.sinks import DIM, PROVENANCE, Database, Lance, Postgres, assert_holds, batch, target

#: Spellings that a database, or a language for queries, may take for something else.
AWKWARD = [
    *(
        "",
        " ",
        "it's",
        'a "b"',
        "a;b--",
        "%s",
        "\\",
        "\n",
        "ü",
        "ﬁ",
        "日本",
        "🙂",
        "e\u0301",
        "\u00e9",
        "NULL",
        "x" * 2000,
    ),
    *("0", "7", "007", "-1", "18446744073709551615", "18446744073709551616", "٣", "1.0"),
    *("936da01f-9abd-4d9d-80c7-02af85c822a8", "936DA01F-9ABD-4D9D-80C7-02AF85C822A8"),
    *("{936da01f-9abd-4d9d-80c7-02af85c822a8}", "936da01f9abd4d9d80c702af85c822a8"),
]


def delivered(table: Database, *batches: Batch, to: Target | None = None) -> None:
    """Write batches as one delivery does, each with a commit."""
    sink = table.sink()
    sink.open(to or target())
    for number, each in enumerate(batches, 1):
        sink.write(each)
        sink.commit(number)
    sink.finish()
    sink.close()


def deliver_until_killed(url: str, batches: Sequence[Batch], steps: int) -> None:
    """Do what is left of a delivery, and kill this process after so many steps."""
    sink = sink_of(url, Settings())
    begin = sink.open(target())
    left = iter(range(steps))

    def step() -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    for number in range(begin, len(batches)):
        step()
        sink.write(batches[number])
        step()
        sink.commit(number + 1)
    step()
    sink.finish()
    step()


def resumed_at(table: Database, to: Target | None = None) -> int:
    sink = table.sink()
    try:
        return sink.open(to or target())
    finally:
        sink.close()


def test_what_is_committed_is_there_and_so_is_the_resume_point(table: Database) -> None:
    first, second = batch(["a", "b"]), batch(["c"], seed=1)
    assert resumed_at(table) == 0
    delivered(table, first, second)
    assert_holds(table, first, second)
    assert resumed_at(table) == 2


def test_a_resume_point_counts_for_its_job_and_variant_alone(table: Database) -> None:
    delivered(table, batch(["a"]))
    assert resumed_at(table, target(job="other")) == 0
    assert resumed_at(table, target(variant="other")) == 0
    delivered(table, batch(["b"]), batch(["c"]), to=target(job="other"))
    assert resumed_at(table) == 1
    assert resumed_at(table, target(job="other")) == 2


def test_a_batch_that_is_written_again_doubles_nothing(table: Database) -> None:
    """Its commit may have been lost, or the note of it."""
    rows = batch([f"r{i}" for i in range(50)])
    sink = table.sink()
    sink.open(target())
    sink.write(rows)
    sink.recover()
    sink.write(rows)
    sink.commit(1)
    sink.write(rows)
    sink.write(rows)
    sink.commit(1)
    sink.close()
    assert_holds(table, rows)
    delivered(table, rows.part(slice(20)), rows.part(slice(10, None)), to=target(job="other"))
    assert_holds(table, rows)


def test_a_later_vector_replaces_an_earlier_one(table: Database) -> None:
    delivered(table, batch(["a", "b"]))
    changed = batch(["b", "c"], seed=5)
    delivered(table, changed, to=target(job="other"))
    assert_holds(table, batch(["a", "b"]).part(slice(1)), changed)


def test_ids_come_back_as_they_were(table: Database) -> None:
    rows = batch(AWKWARD)
    delivered(table, rows)
    assert_holds(table, rows)
    delivered(table, rows, to=target(job="other"))
    assert_holds(table, rows)
    sink = table.sink()
    sink.open(target())
    assert sink.verify(rows) == Verified([], [])
    sink.close()


def test_kept_fields_come_back(table: Database) -> None:
    kept: list[dict[str, Any]] = [
        {"title": 'it\'s "ü"', "n": 3, "tags": ["x", {"y": None}]},
        {"title": None, "n": 0.5, "tags": []},
    ]
    rows = batch(["a", "b"], kept=kept)
    delivered(table, rows, to=target(keeps=True))
    found = table.rows()
    assert [found["a"][1], found["b"][1]] == kept


def test_verifying_names_what_is_missing_and_what_is_another(table: Database) -> None:
    rows = batch(["a", "b", "c"])
    delivered(table, rows)
    sink = table.sink()
    sink.open(target())
    same = sink.verify(rows)
    assert (same.missing, same.different) == ([], [])
    found = sink.verify(Batch(["a", "b", "x"], rows.vectors[[0, 2, 1]]))
    assert (found.missing, found.different) == (["x"], ["b"])
    sink.close()


def test_another_models_vectors_are_refused(table: Database) -> None:
    rows = batch(["a"])
    delivered(table, rows)
    other = target(job="other", provenance=dataclasses.replace(PROVENANCE, fingerprint="bb" * 32))
    with pytest.raises(MixedVectors, match=r"holds vectors of dummy, fp32, fingerprint aaaaaaaaaaaa; .*--allow-mixed"):
        resumed_at(table, other)
    assert_holds(table, rows)
    more = batch(["b"], seed=3)
    delivered(table, more, to=dataclasses.replace(other, allow_mixed=True))
    assert_holds(table, rows, more)
    assert resumed_at(table) == 1, "the table stays the first model's"


def test_records_of_unknown_origin_are_refused(table: Database) -> None:
    table.make_foreign()
    with pytest.raises(MixedVectors, match="no note of the model"):
        resumed_at(table)
    delivered(table, batch(["a"]), to=target(allow_mixed=True))
    assert sorted(table.rows()) == ["a", "mine"]


def test_other_dimensions_are_refused_even_if_models_may_be_mixed(table: Database) -> None:
    delivered(table, batch(["a"]))
    longer = dataclasses.replace(PROVENANCE, dim=DIM + 1)
    with pytest.raises(OutputError, match=f"{DIM}"):
        resumed_at(table, target(provenance=longer, allow_mixed=True))


def test_a_table_that_was_made_again_has_no_resume_point(table: Database) -> None:
    rows = batch(["a"])
    delivered(table, rows)
    table.remove()
    assert resumed_at(table) == 0
    delivered(table, rows)
    assert_holds(table, rows)


def test_float16(table: Database) -> None:
    rows = batch(["a", "b"])
    delivered(table, rows, to=target(half=True))
    assert_holds(table, rows, tolerance=2e-3)
    vectors = np.stack([table.rows()[label][0] for label in rows.ids])
    assert not np.array_equal(vectors, rows.vectors)
    with pytest.raises(OutputError, match=r"vector|float"):
        resumed_at(table)


@pytest.mark.slow
def test_a_process_that_dies_between_any_two_steps_leaves_what_can_be_repeated(table: Database, tmp_path: Path) -> None:
    """Each process writes and commits two batches, and is killed before or after one of these steps."""
    batches = [batch([f"r{i}" for i in range(20)]), batch([f"s{i}" for i in range(20)], seed=1)]
    deaths = 0
    for steps in range(7):
        deaths += status_of_fork(deliver_until_killed, table.url, batches, steps) == -signal.SIGKILL
        rows = table.rows()
        whole = [each for each in batches if each.ids[0] in rows]
        assert_holds(table, *whole)
        assert resumed_at(table) <= len(whole)
    assert deaths >= 2
    assert_holds(table, *batches)
    assert resumed_at(table) == 2


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_larger_than_a_request(table: Database, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.sinks.qdrant._REQUEST_BYTES", 1000 * rows)
    whole = batch([f"r{i}" for i in range(10)], kept=[{"n": i} for i in range(10)])
    delivered(table, whole, to=target(keeps=True))
    assert_holds(table, whole)


def test_postgres_changes_no_row_when_a_batch_comes_again(in_postgres: Postgres) -> None:
    rows = batch(["a", "b"], kept=[{"n": 1}, {"n": 2}])
    delivered(in_postgres, rows, to=target(keeps=True))
    before = in_postgres.stamps()
    delivered(in_postgres, rows, to=target(keeps=True, job="other"))
    assert in_postgres.stamps() == before


def test_postgres_that_drops_the_connection_gets_the_batch_again(
    in_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the commit, after the batch was handed over; and between two batches."""
    monkeypatch.setattr(deliveries, "OUTSIDE", Policy(0.0, 0.0))
    sink = in_postgres.sink()
    sink.open(target())
    rows, more = batch(["a", "b"]), batch(["c"], seed=1)
    sink.write(rows)
    in_postgres.drop_connections()
    with pytest.raises(SinkUnavailable):
        sink.commit(1)
    write_and_commit(sink, rows, 1)
    in_postgres.drop_connections()
    write_and_commit(sink, more, 2)
    sink.close()
    assert_holds(in_postgres, rows, more)
    assert resumed_at(in_postgres) == 2


@pytest.mark.parametrize("label", ["nul\0", "".join(map(str, np.random.default_rng(0).integers(0, 2**62, 400)))])
def test_postgres_refuses_ids_that_it_can_not_hold(in_postgres: Postgres, label: str) -> None:
    """The second one is too long for an index, which psycopg calls an error of the server's operation."""
    sink = in_postgres.sink()
    sink.open(target())
    with pytest.raises(SinkRefused):
        sink.write(batch([label]))
    sink.close()


def write_to_a_full_disk(url: str, said: Path) -> None:
    """Write down what a sink raises where no file can grow beyond a limit, which stands for a full disk."""
    sink = sink_of(url, Settings())
    sink.open(target())
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        sink.write(batch([f"r{i}" for i in range(10_000)]))
    except SinkUnavailable as error:
        said.write_text(str(error))


def test_a_full_disk_is_not_the_fault_of_records(tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert status_of_fork(write_to_a_full_disk, f"lancedb://{tmp_path}?table=t", said) == 0
    assert "File too large" in said.read_text()
    assert ".rs:" not in said.read_text()


def test_a_table_of_lance_that_was_begun_is_made(in_lance: Lance) -> None:
    """Its maker died before it was there."""
    (in_lance.folder / f"{in_lance.table}.lance").mkdir(parents=True)
    delivered(in_lance, batch(["a"]))
    assert_holds(in_lance, batch(["a"]))


def test_two_processes_do_not_write_to_one_lance_table(in_lance: Lance) -> None:
    first, second = in_lance.sink(), in_lance.sink()
    first.open(target())
    with pytest.raises(OutputError, match="another fetch is writing"):
        second.open(target(job="other"))
    first.close()
    assert second.open(target(job="other")) == 0
    second.close()


# Deleting


def deleted(table: Database, *ids: str, to: Target | None = None) -> int:
    return delete_all(table.sink(), to or target(), ids)


def test_records_are_deleted_by_their_ids_and_those_that_are_not_there_are_no_error(table: Database) -> None:
    rows = batch(["a", "b", "c", "d"])
    delivered(table, rows)
    assert deleted(table, "b", "nobody", "d") == 2
    assert_holds(table, rows.part(np.array([0, 2])))
    assert deleted(table, "b", "nobody", "d") == 0
    assert deleted(table) == 0
    assert_holds(table, rows.part(np.array([0, 2])))
    assert resumed_at(table) == 1, "what was delivered stays delivered"


def test_nothing_is_there_to_delete_in_a_new_table(table: Database) -> None:
    assert deleted(table, "a") == 0


def test_awkward_ids_are_deleted_and_no_others(table: Database) -> None:
    rows = batch(AWKWARD)
    delivered(table, rows)
    assert deleted(table, *AWKWARD[::2]) == len(AWKWARD[::2])
    assert_holds(table, rows.part(slice(1, None, 2)))
    for label in AWKWARD[1::2]:
        assert deleted(table, label) == 1
    assert table.rows() == {}


def test_an_id_with_a_nul_is_no_error(table: Database) -> None:
    delivered(table, batch(["nul"]))
    assert deleted(table, "nul\0") == 0
    assert_holds(table, batch(["nul"]))


def test_many_are_deleted_in_batches(table: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.sinks.deletion._MOST_IDS", 7)
    rows = batch([f"r{i}" for i in range(50)])
    delivered(table, rows)
    assert deleted(table, *rows.ids[:45]) == 45
    assert_holds(table, rows.part(slice(45, None)))


def test_nothing_is_deleted_from_the_table_of_another_model(table: Database) -> None:
    rows = batch(["a"])
    delivered(table, rows)
    with pytest.raises(MixedVectors):
        deleted(table, "a", to=target(provenance=dataclasses.replace(PROVENANCE, fingerprint="bb" * 32)))
    assert_holds(table, rows)


def test_nothing_is_deleted_from_a_foreign_table(table: Database) -> None:
    table.make_foreign()
    with pytest.raises(MixedVectors):
        deleted(table, "mine")
    assert sorted(table.rows()) == ["mine"]


def test_postgres_that_drops_the_connection_is_asked_to_delete_again(
    in_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "OUTSIDE", Policy(0.0, 0.0))
    monkeypatch.setattr("embedctl.sinks.deletion._MOST_IDS", 1)
    rows = batch(["a", "b", "c"])
    delivered(in_postgres, rows)

    def ids() -> Iterator[str]:
        yield "a"
        yield "b"
        in_postgres.drop_connections()

    assert delete_all(in_postgres.sink(), target(), ids()) == 2
    assert_holds(in_postgres, rows.part(slice(2, None)))


def test_lance_deletes_under_its_lock(in_lance: Lance) -> None:
    delivered(in_lance, batch(["a"]))
    writer = in_lance.sink()
    writer.open(target())
    with pytest.raises(OutputError, match="another fetch is writing"):
        deleted(in_lance, "a")
    writer.close()
    assert deleted(in_lance, "a") == 1

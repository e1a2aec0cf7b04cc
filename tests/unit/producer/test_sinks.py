"""Sinks without a database: their URLs, the ids of records, and what is done when a database refuses."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from embedctl import unique
from embedctl.cli import main
from embedctl.results import ChunkVectors
from embedctl.sinks import deliver as deliveries
from embedctl.sinks.base import Batch, Provenance, Verified, check_provenance, compared
from embedctl.sinks.deliver import Options, options_of, write_and_commit
from embedctl.sinks.ids import Duplicates, LeftOut, decided
from embedctl.sinks.notes import noted, resume_point
from embedctl.sinks.registry import BUILT_IN, kinds, sink_of
from embedctl.sinks.urls import parse_url
from embedctl_config.errors import (
    InputError,
    MissingExtra,
    MixedVectors,
    OutputError,
    SettingsError,
    SinkRefused,
    SinkUnavailable,
)
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from tests.support.memory_sink import TARGET, Memory, memo_plugin
from tests.support.packages import need
from tests.support.result_chunks import result_chunk, unit_vectors


def batch(ids: Sequence[str]) -> Batch:
    return Batch(list(ids), unit_vectors(len(ids), 4))


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr("embedctl_config.retry.time.sleep", pauses.append)
    return pauses


# URLs


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@db/x?table=t",
        "postgresql://me:@db/x?table=t",
        "postgresql://db/x?table=t&password=hunter2",
        "postgres://db/x?table=t&sslpassword=hunter2",
        "qdrant+https://hunter2@db/c",
        "qdrant+http://db/c?api_key=hunter2",
        "qdrant+http://db/c?API-KEY=hunter2",
        "lancedb://me:hunter2@x/y?table=t",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(SettingsError, match="leave it out, and") as refused:
        sink_of(url, Settings())
    assert "hunter2" not in str(refused.value)


def test_the_fix_for_a_secret_names_what_the_database_reads() -> None:
    with pytest.raises(SettingsError, match=r"PGPASSWORD.*pgpass.*service file"):
        sink_of("postgresql://me:x@db/x?table=t", Settings())
    with pytest.raises(SettingsError, match="QDRANT_API_KEY"):
        sink_of("qdrant+http://x@db/c", Settings())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("docs.parquet", "no database has a URL that begins with 'that'"),
        ("mysql://secret@db/x", "begins with 'mysql'. Known: lancedb, postgres, postgresql, qdrant"),
        ("postgresql://db/x", "add the table"),
        ("postgresql://db/x?table=", "add the table"),
        ("postgresql://db/x?table=a.b.c", r"schema\.name"),
        ("postgresql://db/x?table=a&table=b", "twice"),
        ("postgresql://db/x?table=a#b", "%23"),
        ("postgresql://[::1/x?table=t", "can't be read as a URL"),
        ("lancedb:///x", "add the table"),
        ("lancedb://x/y?table=t", "lancedb:///FOLDER"),
        ("lancedb:///?table=t", "name the database's folder"),
        ("lancedb:///x?table=t&mode=w", "no option 'mode'. Known: table"),
        ("qdrant+http://db", r"HOST\[:PORT\]/COLLECTION"),
        ("qdrant+http://db/a/b", r"HOST\[:PORT\]/COLLECTION"),
        ("qdrant+http:///c", r"HOST\[:PORT\]/COLLECTION"),
        ("qdrant+http://db/c?distance=l2", "distance is one of cosine, dot"),
        ("qdrant://db/c?collection=x", "qdrant:///FOLDER"),
    ],
)
def test_urls_that_are_wrong_say_what_is_right(url: str, message: str) -> None:
    for module in ("psycopg", "qdrant_client", "lancedb"):
        need(module)
    with pytest.raises(SettingsError, match=message) as refused:
        sink_of(url, Settings())
    assert "secret" not in str(refused.value)


def test_a_relative_folder_is_one_of_the_working_directory() -> None:
    need("lancedb")
    assert sink_of("lancedb:out/lance?table=t", Settings()).name == "lancedb:out/lance?table=t"


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lancedb", None)
    monkeypatch.delitem(sys.modules, "embedctl.sinks.lance", raising=False)
    with pytest.raises(MissingExtra, match=r"embedctl\[lancedb\]"):
        sink_of("lancedb:///x?table=t", Settings())


def test_every_extra_of_a_sink_exists() -> None:
    import tomllib

    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"]
    assert {kind.extra for kind in BUILT_IN} <= set(project["optional-dependencies"])


def test_the_api_key_of_qdrant_comes_from_the_environment_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({"QDRANT_API_KEY": "hunter2"}).qdrant_api_key == "hunter2"
    both = {"QDRANT_API_KEY": "weak", "EMBEDCTL_QDRANT_API_KEY": "strong"}
    assert load_settings(both).qdrant_api_key == "strong"
    assert "hunter2" not in repr(load_settings({"QDRANT_API_KEY": "hunter2"}))
    monkeypatch.setenv("QDRANT_API_KEY", "hunter2")
    for flags in ([], ["--json"]):
        shown = CliRunner().invoke(main, ["config", "show", *flags]).output
        assert "hunter2" not in shown
        assert "QDRANT_API_KEY" in shown


def test_plain_urls_are_read() -> None:
    url = parse_url("postgresql://m%40e@db:5433/x?table=a&sslmode=require", password_fix="", user_is_allowed=True)
    assert (url.user, url.address, url.path) == ("m@e", "db:5433", "/x")
    assert url.query == {"table": "a", "sslmode": "require"}


# Plug-ins


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with memo_plugin(tmp_path, monkeypatch):
        yield


def test_a_plugin_is_listed_and_found_by_its_scheme(plugin: None) -> None:
    assert [(kind.name, kind.plugin) for kind in kinds() if kind.plugin] == [
        ("memo", "memo-sink 1.2"),
        ("postgresql", "memo-sink 1.2"),
    ]
    sink = sink_of("memo://x/y?z=1", Settings())
    assert str(sink.url) == "memo://x/y?z=1"  # type: ignore[attr-defined]  # the plug-in's own
    with pytest.raises(SettingsError, match="reads it from the environment"):
        sink_of("memo://me:pw@x/y", Settings())


def test_a_plugin_never_takes_over_a_scheme_of_ours(plugin: None) -> None:
    need("psycopg")
    assert type(sink_of("postgresql://db/x?table=t", Settings())).__name__ == "PostgresSink"


def test_the_command_lists_databases(plugin: None) -> None:
    shown = CliRunner().invoke(main, ["sinks"])
    assert shown.exit_code == 0
    assert "postgresql://[USER@]HOST[:PORT]/DATABASE?table=TABLE" in shown.output
    assert "yes, from memo-sink 1.2" in shown.output
    listed = json.loads(CliRunner().invoke(main, ["sinks", "--json"]).output)
    assert [each["extra"] for each in listed] == ["pgvector", "qdrant", "qdrant", "lancedb", None, None]


def test_a_database_whose_client_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.sinks.registry.find_spec", lambda name: None)
    assert "no: pip install 'embedctl[qdrant]'" in CliRunner().invoke(main, ["sinks"]).output


# Ids


def chunks(*labels: Sequence[str | None], failed: Sequence[int] = ()) -> list[ChunkVectors]:
    """Chunks of records with these ids, of which the failed positions have no vector."""
    made, first = [], 0
    for ids in labels:
        rows = [position - first for position in failed if first <= position < first + len(ids)]
        made.append(result_chunk(unit_vectors(len(ids), 2), first=first, ids=ids, failed=rows))
        first += len(ids)
    return made


def test_ids_that_are_unique_leave_nothing_out() -> None:
    left_out = decided(chunks(["a", "b"], ["c"]), 3, Duplicates.ERROR)
    assert left_out.count == 0
    assert not left_out.among(np.arange(3)).any()


def test_equal_ids_are_refused_by_name_of_their_positions() -> None:
    with pytest.raises(InputError, match=r"2 ids are not unique(.|\n)*record 2: its id is that of record 0"):
        decided(chunks(["a", "b"], ["a", "b"]), 4, Duplicates.ERROR)


@pytest.mark.parametrize(("which", "expected"), [(Duplicates.FIRST, [2, 3, 5]), (Duplicates.LAST, [0, 1, 3])])
@pytest.mark.parametrize("held", [2, 3, 1000])
def test_all_but_one_of_equal_ids_are_left_out(
    which: Duplicates, expected: list[int], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the ids do not fit into memory."""
    monkeypatch.setattr(unique, "_HELD", held)
    left_out = decided(chunks(["a", "b", "a"], ["b", "c", "b"], ["d", "e"]), 8, which)
    assert np.flatnonzero(left_out.among(np.arange(8))).tolist() == expected
    assert left_out.count == 3


def test_many_ids_and_many_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique, "_HELD", 700)
    random = np.random.default_rng(1)
    labels = [f"r{number}" for number in random.integers(0, 3000, 10_000)]
    parts = [labels[at : at + 97] for at in range(0, len(labels), 97)]
    for which in (Duplicates.FIRST, Duplicates.LAST):
        left_out = decided(chunks(*parts), len(labels), which).among(np.arange(len(labels)))
        places = range(len(labels)) if which is Duplicates.FIRST else range(len(labels) - 1, -1, -1)
        seen: set[str] = set()
        for position in places:
            assert left_out[position] == (labels[position] in seen)
            seen.add(labels[position])


def test_a_failed_record_needs_no_id_and_takes_none_away() -> None:
    assert decided(chunks(["a", None], ["a"], failed=[0, 1]), 3, Duplicates.ERROR).count == 0


def test_a_record_without_an_id_is_named() -> None:
    with pytest.raises(InputError, match=r"2 records have no id.*--duplicates position.*Positions: 1, 2"):
        decided(chunks(["a", None], [None]), 3, Duplicates.FIRST)


def test_positions_left_out_are_single_bits() -> None:
    left_out = LeftOut(20)
    left_out.add(np.array([0, 7, 8, 19], np.uint64))
    assert np.flatnonzero(left_out.among(np.arange(20))).tolist() == [0, 7, 8, 19]


def test_points_of_qdrant() -> None:
    need("qdrant_client")
    from embedctl.sinks.qdrant import point_id

    assert point_id("c", "0") == 0
    assert point_id("c", str(2**64 - 1)) == 2**64 - 1
    own = "936da01f-9abd-4d9d-80c7-02af85c822a8"
    assert point_id("c", own) == own
    space = uuid.uuid5(uuid.NAMESPACE_URL, "embedctl:c")
    for label in ("", "007", "-1", "٣", str(2**64), "1" * 5000, own.upper(), own.replace("-", ""), f"{{{own}}}", "a b"):
        assert point_id("c", label) == str(uuid.uuid5(space, label))
    assert point_id("c", "x") != point_id("d", "x")


# Whose vectors a table holds


def test_provenance_survives_and_other_text_is_none() -> None:
    assert Provenance.from_json(TARGET.provenance.to_json()) == TARGET.provenance
    for text in ("", "null", "[]", "{", '{"model": "m"}', '{"fingerprint": 1, "precision": 2, "model": 3, "dim": "x"}'):
        assert Provenance.from_json(text) is None


def test_an_empty_table_may_become_any_models() -> None:
    assert check_provenance(None, TARGET, "t", empty=True)
    other = Provenance("bb" * 32, "fp32", "m", 4)
    assert check_provenance(other, TARGET, "t", empty=True)
    assert not check_provenance(TARGET.provenance, TARGET, "t", empty=True)
    with pytest.raises(MixedVectors):
        check_provenance(other, TARGET, "t", empty=False)


def test_comparing() -> None:
    rows = batch(["a", "b"])
    assert compared(rows, {"a": rows.vectors[0], "b": rows.vectors[1] + 2e-6}, half=False) == Verified([], ["b"])
    assert compared(rows, {"a": rows.vectors[0] * 3, "b": rows.vectors[1]}, half=False, directions=True) == Verified(
        [], []
    )
    assert compared(rows, {"a": rows.vectors[0][:2]}, half=False) == Verified(["b"], ["a"])


def test_a_note_holds_the_latest_jobs() -> None:
    note: dict[str, object] = {}
    for number in range(100):
        note = noted(note, f"J{number}", "v", number)
    note = noted(note, "J90", "w", 5)
    assert len(note) == 32
    assert (resume_point(note, "J99", "v"), resume_point(note, "J90", "w"), resume_point(note, "J90", "v")) == (
        99,
        5,
        0,
    )
    assert resume_point({"J": "damaged"}, "J", "v") == resume_point({}, "J", "v") == 0


# Refusals, and a database that is away


def test_the_commit_comes_after_the_write() -> None:
    sink = Memory()
    write_and_commit(sink, batch("abc"), 7)
    assert sink.steps == ["write 3", "commit 7"]


def test_a_database_that_comes_back_gets_the_batch_again(no_pauses: list[float]) -> None:
    sink = Memory(away=4)
    write_and_commit(sink, batch("abc"), 7)
    assert sorted(sink.rows) == ["a", "b", "c"]
    assert sink.resume == 7
    assert no_pauses == [1, 2, 4, 8]


def test_a_database_that_stays_away_ends_the_delivery(no_pauses: list[float]) -> None:
    sink = Memory(away=10**6)
    with pytest.raises(SinkUnavailable, match=r"is away\. Tried 5 times; the same command continues"):
        write_and_commit(sink, batch("abc"), 7)
    assert sink.steps.count("write 3") == 5
    assert sink.resume == 0


@pytest.mark.parametrize("at", [0, 1, 57, 99])
def test_a_record_that_is_refused_is_found_and_named_after_five_tries(no_pauses: list[float], at: int) -> None:
    sink = Memory()
    ids = [f"r{number}" for number in range(100)]
    ids[at] = "bad one"
    with pytest.raises(SinkRefused, match=r"refuses bad one\. Tried 5 times\. Records: 'bad one'\. What"):
        write_and_commit(sink, batch(ids), 7)
    assert sink.steps.count("write 100") == 5
    assert sink.resume == 0


def test_an_id_that_occurs_twice_in_a_batch_is_refused_before_it_is_written() -> None:
    """Ids were unique when they were looked at; a corpus may change until it is read."""
    sink = Memory()
    with pytest.raises(SinkRefused, match="ids occur twice in the job: 'a'"):
        write_and_commit(sink, batch(["a", "b", "a"]), 7)
    assert sink.steps == []


def test_vectors_that_are_not_finite_are_refused_before_they_are_written() -> None:
    rows = batch(["a", "b"])
    rows.vectors[1, 2] = np.inf
    sink = Memory()
    with pytest.raises(SinkRefused, match=r"not finite\. Records: 'b'"):
        write_and_commit(sink, rows, 7)
    assert sink.steps == []


def test_options() -> None:
    assert options_of("error", None, allow_mixed=False) == Options()
    assert options_of("last", "float16", allow_mixed=True).duplicates is Duplicates.LAST
    for words in [("never", None), ("all", None), ("error", "int8")]:
        with pytest.raises(SettingsError):
            options_of(*words, allow_mixed=False)


def test_differences_at_the_end_are_an_error() -> None:
    with pytest.raises(OutputError, match=r"does not hold what it has acknowledged.*'x'"):
        deliveries._refuse_differences("t", Verified(["x"], []))

"""What `--since` with `--to` says and refuses, without a database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner

from embedctl.cli import bring as bringing
from embedctl.cli import main
from embedctl.cli.delivery import SinkChoice
from embedctl.sinks import deletion
from embedctl.sinks.deletion import delete_all
from embedctl.sinks.deliver import Options
from embedctl_config.errors import JobFailed, OutputError, SettingsError, SinkUnavailable
from tests.support.memory_sink import TARGET, Memory, memo_plugin


class Forgetful(Memory):
    """A database that can delete."""

    def delete(self, ids: Sequence[str]) -> int:
        self.steps.append(f"delete {len(ids)}")
        if self.away:
            self.away -= 1
            raise SinkUnavailable("memory: is away")
        return sum(self.rows.pop(label, None) is not None for label in ids)


class Results:
    """Stands for a corpus without vectors, from which records are gone."""

    def __init__(self, gone: int, dim: int | None = None) -> None:
        self.gone, self.unchanged, self.dim = gone, 0, dim

    def status(self) -> Any:
        return self


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr("embedctl_config.retry.time.sleep", pauses.append)
    return pauses


def test_deleting_is_tried_again(pauses: list[float]) -> None:
    sink = Forgetful(away=4)
    sink.rows = {label: np.zeros(4) for label in "abc"}
    assert delete_all(sink, TARGET, ["a", "x", "c"]) == 2
    assert list(sink.rows) == ["b"]
    assert pauses == [1, 2, 4, 8]


def test_a_database_that_stays_away_ends_it(pauses: list[float]) -> None:
    with pytest.raises(SinkUnavailable, match=r"is away\. Tried 5 times; the same command continues"):
        delete_all(Forgetful(away=5), TARGET, ["a"])


def test_a_request_has_a_bounded_number_of_ids_and_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "_MOST_IDS", 3)
    monkeypatch.setattr(deletion, "_MOST_CHARACTERS", 10)
    sink = Forgetful()
    delete_all(sink, TARGET, iter(["a", "b", "c", "d", "e" * 9, "f" * 50, "g"]))
    assert sink.steps == ["delete 3", "delete 2", "delete 1", "delete 1"]


def test_a_sink_without_deletion_says_so() -> None:
    assert (Memory().deletes, Forgetful().deletes) == (False, True)
    with pytest.raises(SettingsError, match="omit --delete-missing"):
        delete_all(Memory(), TARGET, ["a"])


def test_a_plugin_without_deletion_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.jsonl").write_text('{"id": "a", "text": "b"}\n')
    flags = ["--since", "v.parquet", "-o", "v.parquet", "--to", "memo:x", "--delete-missing"]
    with memo_plugin(tmp_path, monkeypatch):
        answers = [CliRunner().invoke(main, [command, "c.jsonl", *flags]) for command in ("run", "submit")]
    for refused in answers:
        assert refused.exit_code == 2
        assert "memo:x: this kind of database can't delete records: omit --delete-missing" in refused.output
    assert not Path("v.parquet").exists()


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def deleting(sink: Memory, results: Results, output: Path, *, asked: bool = True) -> list[str]:
    choice = SinkChoice("memo:x", sink, Options(), is_update=True, delete_missing=asked)
    said = Said()
    bringing._delete(choice, cast(Any, results), output, cast(Any, said))
    return said.lines


def test_nothing_is_deleted_if_nothing_tells_whose_vectors_there_are(tmp_path: Path) -> None:
    sink = Forgetful()
    with pytest.raises(JobFailed, match="no record of the corpus has a vector: nothing is deleted"):
        deleting(sink, Results(2), tmp_path / "v.parquet")
    assert sink.steps == []


def test_a_list_that_another_command_changed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bringing, "target_of", lambda *_: TARGET)
    (tmp_path / "v.deleted.jsonl").write_text(json.dumps({"id": "a", "text_sha256": "00" * 32}) + "\n")
    with pytest.raises(OutputError, match=r"v\.deleted\.jsonl was changed meanwhile: start the same command again"):
        deleting(Forgetful(), Results(2, 4), tmp_path / "v.parquet")


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (1, "1 record is gone and stays in the table: --delete-missing deletes what is gone"),
        (2000, "2,000 records are gone and stay in the table: --delete-missing deletes what is gone"),
    ],
)
def test_what_stays_is_counted(count: int, line: str, tmp_path: Path) -> None:
    sink = Forgetful()
    assert deleting(sink, Results(count, 4), tmp_path / "v.parquet", asked=False) == [line]
    assert sink.steps == []

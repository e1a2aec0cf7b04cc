"""Measurements outlive the command that takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embedctl_bench.measuring import session as module
from embedctl_bench.measuring.session import FILE, Session
from embedctl_config.errors import OutputError


def open_in(folder: Path, name: str = "engines", *, fresh: bool = False, cpus: str = "0") -> Session:
    return Session(folder, name, fresh=fresh, plan=3, conditions={"cpus": cpus})


def never() -> Any:
    pytest.fail("measured again")


def raising(error: type[BaseException]) -> Any:
    raise error


@pytest.fixture
def _one(tmp_path: Path) -> None:
    """One step of the engines is measured."""
    with open_in(tmp_path) as session:
        session.step("one", lambda: 1)


@pytest.mark.usefixtures("_one")
def test_what_was_measured_is_not_measured_again_and_the_load_of_then_is_told(tmp_path: Path) -> None:
    line = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(line | {"seconds": 90.0, "others_cpus": 0.25, "stolen_cpus": 0.5}) + "\n")
    with open_in(tmp_path) as session:
        assert session.step("one", never) == 1
    facts = session.meanwhile()
    assert facts["CPUs used by other processes meanwhile"] == "median 0.25, most 0.25 (of 1 steps)"
    assert "load before" not in facts, "that of now says nothing of then"
    assert facts["CPUs stolen by the hypervisor meanwhile"] == "median 0.50, most 0.50 (of 1 steps)"
    assert str(facts["taken from earlier runs"]).startswith("1 steps in 1.5 minutes, of 20")


@pytest.mark.usefixtures("_one")
@pytest.mark.parametrize("change", ["benchmark", "conditions", "versions", "CPU"])
def test_other_measurements_do_not_count(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "versions":
        monkeypatch.setattr(module, "versions", lambda: {"torch": "99"})
    if change == "CPU":
        monkeypatch.setattr(module, "cpu_identity", lambda: "another")
    cpus = "1" if change == "conditions" else "0"
    with open_in(tmp_path, "grid" if change == "benchmark" else "engines", cpus=cpus) as session:
        assert session.step("one", lambda: 2) == 2


@pytest.mark.usefixtures("_one")
def test_fresh_forgets_what_this_benchmark_has_measured_and_no_other(tmp_path: Path) -> None:
    with open_in(tmp_path, "grid") as session:
        session.step("one", lambda: 1)
    with open_in(tmp_path, fresh=True) as session:
        assert session.step("one", lambda: 2) == 2
    with open_in(tmp_path, "grid") as session:
        assert session.step("one", never) == 1


@pytest.mark.usefixtures("_one")
def test_a_line_that_was_cut_short_costs_nothing_but_itself(tmp_path: Path) -> None:
    with (tmp_path / FILE).open("a") as file:
        file.write('{"benchmark": "engines", "key": "tw')
    for second in (lambda: 22, never):
        with open_in(tmp_path) as session:
            assert session.step("one", never) == 1
            assert session.step("two", second) == 22


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.usefixtures("_one")
def test_a_step_that_fails_or_is_stopped_is_not_kept_and_what_there_is_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: type[BaseException]
) -> None:
    with pytest.raises(error), open_in(tmp_path) as session:
        session.step("two", lambda: raising(error))
    assert session.stopped == (error is KeyboardInterrupt) == ("goes on from there" in capfd.readouterr().err)
    with open_in(tmp_path) as session:
        assert session.step("one", never) == 1
        assert session.step("two", lambda: 2) == 2
        with pytest.raises(ValueError, match="'one'"):
            session.step("one", never)


def test_a_folder_that_can_t_be_written_to_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be kept in"):
        open_in(tmp_path / "file")

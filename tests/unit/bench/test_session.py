"""Measurements outlive the command that takes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from embedctl_bench.measuring import machine
from embedctl_bench.measuring import session as module
from embedctl_bench.measuring.session import FILE, Session
from embedctl_config.errors import OutputError


def open_in(folder: Path, name: str = "engines", *, fresh: bool = False, **conditions: object) -> Session:
    return Session(folder, name, fresh=fresh, plan=3, conditions=conditions)


def never() -> Any:
    pytest.fail("measured again")


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    with open_in(tmp_path) as session:
        assert session.step("one", lambda: {"rate": [1.5, None]}) == {"rate": [1.5, None]}
    with open_in(tmp_path) as session:
        assert session.step("one", never) == {"rate": [1.5, None]}
        assert session.step("two", lambda: 2) == 2
    assert str(session.meanwhile()["taken from earlier runs"]).startswith("1 steps in ")


def test_a_report_tells_the_load_of_the_earlier_runs_too(tmp_path: Path) -> None:
    with open_in(tmp_path) as session:
        session.step("one", lambda: 1)
    line = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(line | {"seconds": 90.0, "others_cpus": 0.25, "stolen_cpus": 0.5}) + "\n")
    with open_in(tmp_path) as session:
        session.step("one", never)
    facts = session.meanwhile()
    assert facts["CPUs used by other processes meanwhile"] == "median 0.25, most 0.25 (of 1 steps)"
    assert "load before" not in facts, "that of now says nothing of then"
    assert facts["CPUs stolen by the hypervisor meanwhile"] == "median 0.50, most 0.50 (of 1 steps)"
    assert str(facts["taken from earlier runs"]).startswith("1 steps in 1.5 minutes, of 20")


@pytest.mark.parametrize("change", ["benchmark", "conditions", "versions", "CPU"])
def test_a_measurement_of_something_else_does_not_count(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_in(tmp_path, cpus="0") as session:
        session.step("one", lambda: 1)
    if change == "versions":
        monkeypatch.setattr(module, "versions", lambda: {"torch": "99"})
    if change == "CPU":
        monkeypatch.setattr(module, "cpu_identity", lambda: "another")
    name = "grid" if change == "benchmark" else "engines"
    with open_in(tmp_path, name, cpus="1" if change == "conditions" else "0") as session:
        assert session.step("one", lambda: 2) == 2


def test_fresh_forgets_what_this_benchmark_has_measured_and_no_other(tmp_path: Path) -> None:
    for name in ("engines", "grid"):
        with open_in(tmp_path, name) as session:
            session.step("one", lambda: 1)
    with open_in(tmp_path, fresh=True) as session:
        assert session.step("one", lambda: 2) == 2
    with open_in(tmp_path, "grid") as session:
        assert session.step("one", never) == 1


def test_a_line_that_was_cut_short_costs_nothing_but_itself(tmp_path: Path) -> None:
    with open_in(tmp_path) as session:
        session.step("one", lambda: 1)
        session.step("two", lambda: 2)
    file = tmp_path / FILE
    file.write_text(file.read_text()[:-20])
    with open_in(tmp_path) as session:
        assert session.step("one", never) == 1
        assert session.step("two", lambda: 22) == 22
    with open_in(tmp_path) as session:
        assert session.step("two", never) == 22


def test_a_step_that_fails_is_not_kept(tmp_path: Path) -> None:
    with open_in(tmp_path) as session, pytest.raises(ZeroDivisionError):
        session.step("one", lambda: 1 // 0)
    with open_in(tmp_path) as session:
        assert session.step("one", lambda: 1) == 1


def test_two_steps_of_one_key_are_a_mistake(tmp_path: Path) -> None:
    with open_in(tmp_path) as session:
        session.step("one", lambda: 1)
        with pytest.raises(ValueError, match="'one'"):
            session.step("one", lambda: 2)


def test_ctrl_c_stops_it_and_keeps_what_there_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    session = open_in(tmp_path)
    session.step("one", lambda: 1)
    with pytest.raises(KeyboardInterrupt), session:
        session.step("two", interrupted)
    assert session.stopped
    assert "goes on from there" in capfd.readouterr().err
    with open_in(tmp_path) as session:
        assert session.step("one", never) == 1


def test_a_folder_that_can_t_be_written_to_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be kept in"):
        open_in(tmp_path / "file")


def test_progress_is_plain_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open_in(tmp_path) as session:
        session.step("one", lambda: time.sleep(0.02))
        session.step("two", lambda: 2)
    said = capfd.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert re.fullmatch(r"engines 1/3: one: 0\.\d s; about \d+ s left", first)
    assert re.fullmatch(r"engines 2/3: two: 0\.\d s; about \d+ s left", second)


@pytest.mark.parametrize(("plan", "left"), [(1, "done"), (11, "about 10 s left"), (1201, "about 20 min left")])
def test_time_left_is_what_the_new_steps_so_far_took(
    tmp_path: Path, plan: int, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(module, "Usage", Still)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    session = Session(tmp_path, "x", fresh=False, plan=plan)
    session.step("one", lambda: 1)
    assert session.left() == left
    again = Session(tmp_path, "x", fresh=False, plan=2)
    again.step("one", never)
    assert again.left() == "time left unknown"


class Still(machine.Usage):
    @classmethod
    def read(cls) -> machine.Usage:
        return machine.Usage(0.0, 0.0, 0.0, 0.0)


BURN = "import time; end = time.process_time() + 0.6\nwhile time.process_time() < end: pass"


def test_cpu_time_of_our_children_is_ours() -> None:
    before = machine.Usage.read()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert machine.Usage.read().since(before).ours >= 0.5


def test_cpu_time_of_a_stranger_is_told() -> None:
    before = machine.Usage.read()
    # Its parent ends at once, so that it is nobody's child that is ours.
    subprocess.run(["sh", "-c", '"$0" -c "$1" & echo', sys.executable, BURN], check=True, stdout=subprocess.DEVNULL)
    time.sleep(1.5)
    usage = machine.Usage.read().since(before)
    assert usage.others * usage.wall >= 0.5
    assert usage.ours < 0.5


def test_the_facts_of_a_machine_name_its_cpu_cores_and_versions() -> None:
    facts = machine.facts({0})
    assert facts["CPU"]
    assert str(facts["CPUs used"]).endswith("1 cores")
    assert re.fullmatch(r"\d+\.\d GiB", str(facts["memory"]))
    assert {"python", "embedctl", "numpy", "redis"} <= set(machine.versions())

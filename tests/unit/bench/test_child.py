"""Child processes that answer lines of JSON: their errors, their deaths, and how they are ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedctl_bench.peers import child
from embedctl_bench.peers.child import ChildProcess, Unavailable
from tests.support.processes import is_running
from tests.support.waiting import eventually

#: It answers with the request's `give`, dies of `die`, and sleeps for `sleep` seconds with a child of its own.
PROGRAM = """\
import json, pathlib, subprocess, sys, time
def slept(seconds):
    started = subprocess.Popen(["sleep", "60"])
    pathlib.Path("started").write_text(str(started.pid))
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        pathlib.Path("interrupted").write_text("")
        sys.exit()
for line in sys.stdin:
    request = json.loads(line)
    if "die" in request:
        sys.exit(request["die"])
    if "sleep" in request:
        slept(request["sleep"])
    print(json.dumps(request["give"]), flush=True)
pathlib.Path("ended").write_text("")
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    monkeypatch.chdir(tmp_path)
    started = ChildProcess([sys.executable, "-c", PROGRAM], {}, tmp_path / "logs" / "child.log")
    yield started
    started.close()


def test_an_answer_for_each_request_and_an_error_leaves_the_process_as_it_is(process: ChildProcess) -> None:
    with pytest.raises(Unavailable, match=r"^out of texts$"):
        process.call(give={"error": "out of texts"})
    assert process.call(give={"x": 2}) == {"x": 2}
    process.close()
    assert Path("ended").exists(), "an idle process ends by itself"


def test_the_last_words_of_one_that_dies_are_told(process: ChildProcess) -> None:
    with pytest.raises(Unavailable, match=r"^its process ended: no memory left$"):
        process.call(die="warning\n  no memory left\n")
    assert process.closed


def test_one_that_does_not_answer_in_time_is_ended(process: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_ANSWER_S", 0.5)
    with pytest.raises(Unavailable, match=r"^no answer within 0\.5 s$"):
        process.call(sleep=60)
    assert process.closed


def test_a_busy_process_ends_with_all_it_started(process: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "answer", dict)
    process.call(sleep=600)
    eventually(lambda: Path("started").exists() and Path("started").read_text())
    process.close()
    assert Path("interrupted").exists()
    started = int(Path("started").read_text())
    eventually(lambda: not is_running(started), what="the end of all that it started")

"""The places of `embedctl up`, with a shell in place of the gateway, and of a worker in quarantine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from embedctl.common import processes
from embedctl.store import WorkerRow
from embedctl_config import keys
from embedctl_config.errors import WorkerError
from embedctl_workers.machine import tally
from embedctl_workers.machine.discovery import find_cpu_sets
from embedctl_workers.supervising import places
from embedctl_workers.supervising.places import GatewayPlace, QuarantinePlace, drain
from embedctl_workers.supervising.plan import PlannedWorker
from embedctl_workers.supervising.registry_link import RegistryLink
from embedctl_workers.supervising.restarts import Pace
from tests.support.processes import children
from tests.support.store import row
from tests.support.waiting import eventually

AWAITED, AWAITED_NO_MORE = (f"expect it within {within_s} s" for within_s in (120, 0))
LISTENS = "echo 'the gateway is at here; stop with Ctrl-C' >&2; "
Make = Callable[[str], GatewayPlace]


@pytest.fixture
def make(caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    """Makes gateways of a shell's script; what is left of them is killed."""
    caplog.set_level(logging.INFO)
    made: list[GatewayPlace] = []

    def gateway(script: str) -> GatewayPlace:
        command = ["sh", "-c", script]
        made.append(GatewayPlace(dict(os.environ), grace_s=0.1, pace=Pace(first_s=0.01), command=command))
        return made[-1]

    yield gateway
    for each in made:
        drain([each], "", time.sleep, lambda: True)


def test_it_is_started_again_and_its_words_are_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    before = set(children(os.getpid()))
    gateway = make(f"echo 'a warning' >&2; {LISTENS} exec sleep 100")
    gateway.start_first()
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "gateway: a warning"),
        ("INFO", "the gateway is at here"),
    ]
    assert gateway.pause() is None
    (first,) = set(children(os.getpid())) - before
    os.kill(first, signal.SIGKILL)

    def tended() -> bool:
        gateway.tend()
        return caplog.messages.count("the gateway is at here") == 2

    eventually(tended)
    assert "gateway: killed by SIGKILL; starting it again in 0.01 s" in caplog.messages
    assert gateway.pause() is None
    drain([gateway], "", time.sleep, lambda: False)
    assert caplog.messages[-1] == "gateway: killed by SIGTERM"
    assert set(children(os.getpid())) <= before


def test_one_that_can_not_start_is_told_in_its_own_words(make: Make) -> None:
    with pytest.raises(WorkerError, match=r"^the gateway can't start: the port is taken$") as refused:
        make("echo 'the port is taken' >&2; exit 2").start_first()
    assert refused.value.exit_code == 2
    with pytest.raises(WorkerError, match=r"^the gateway can't start: killed by SIGKILL$") as refused:
        make("kill -9 $$").start_first()
    assert refused.value.exit_code == 1


def test_one_that_does_not_end_is_killed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    for urgent in (True, False):
        gateway = make(f"trap '' TERM; {LISTENS} while :; do sleep 0.02; done")
        gateway.start_first()
        drain([gateway], "", time.sleep, partial(bool, urgent))
        assert caplog.messages[-1] == "gateway: killed, for it had not ended by itself"


class Registry(RegistryLink):
    """Takes each process for ready at once, and notes what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def expect(self, pid: int) -> None: ...

    def row_of(self, pid: int) -> WorkerRow:
        return row()

    def expect_quarantine(self, queues: Sequence[str], name: str, within_s: float) -> None:
        assert (list(queues), name.partition("@")[0]) == ([keys.queue("cpu", "m")], "cpu:0:quarantine")
        self.told.append(f"expect it within {within_s:g} s")

    def report_exit(self, pid: int, how: str) -> None:
        self.told.append(how)


class Shell(QuarantinePlace):
    """Each of its processes runs a script, in which HOLD takes a chunk."""

    script = "exec sleep 100"
    starts = 0

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self._file = tally.make_file()
        tell = f"import os; os.pwrite({self._file.fileno()}, bytes([1, 0, 0, 0]), 0)"
        command = ["sh", "-c", self.script.replace("HOLD", f"{sys.executable} -c '{tell}'")]
        return processes.start(command, pass_fds=[self._file.fileno()])

    def tend_until(self, condition: Callable[[], object]) -> None:
        def tended() -> bool:
            self.tend()
            return bool(condition())

        eventually(tended)


@pytest.fixture
def quarantine() -> Iterator[Shell]:
    worker = PlannedWorker("cpu", find_cpu_sets(frozenset({0}))[0], ("m",))
    place = Shell(worker, Registry(), environment={}, options=[])
    yield place
    drain([place], "", time.sleep, lambda: True)


def told(place: Shell) -> list[str]:
    assert isinstance(place._registry, Registry)
    return place._registry.told


def test_quarantine_starts_when_it_is_wanted_and_is_awaited_before_a_death_is_told(quarantine: Shell) -> None:
    quarantine.tend()
    assert (quarantine.starts, quarantine.pause(), quarantine.settled) == (0, None, True)
    quarantine.script = "HOLD; kill -SEGV $$"
    quarantine.want()

    def is_at(starts: int) -> bool:
        return quarantine.starts == starts

    for starts in (2, 3):  # a death with a chunk in hand found a text
        quarantine.tend_until(partial(is_at, starts))
        assert quarantine.restarts.given_up is None
    assert told(quarantine) == [AWAITED, *[AWAITED, "killed by SIGSEGV"] * 2]


def test_quarantine_that_ends_is_no_longer_wanted(quarantine: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    quarantine.script = "exit 0"
    quarantine.want()  # perhaps it was about to end
    quarantine.tend_until(lambda: quarantine.starts == 2)
    monkeypatch.setattr(places, "_FOUND_S", 0.0)
    quarantine.tend_until(lambda: quarantine.process is None and quarantine.pause() is None)
    quarantine.tend()
    assert quarantine.process is None


def test_quarantine_that_can_not_start_is_given_up_and_awaited_no_longer(quarantine: Shell) -> None:
    quarantine.script = "exit 4"
    quarantine._look = lambda: None  # type: ignore[method-assign]
    quarantine.want()
    quarantine.tend_until(lambda: quarantine.restarts.given_up == 4)
    quarantine.want()
    quarantine.tend()
    assert (quarantine.starts, quarantine.pause(), told(quarantine)) == (1, None, [AWAITED, AWAITED_NO_MORE])


def test_nothing_waits_for_a_quarantine_that_is_stopped_or_dies_with_nothing_in_hand(quarantine: Shell) -> None:
    quarantine.want()
    quarantine.tend_until(lambda: quarantine.restarts.ready_at is not None)
    quarantine.want()  # its heartbeats say now that it is there
    assert quarantine.process
    quarantine.process.kill()
    quarantine.tend_until(lambda: quarantine.starts == 2)
    drain([quarantine], "", time.sleep, lambda: False)
    assert told(quarantine) == [AWAITED, AWAITED_NO_MORE, "killed by SIGKILL", AWAITED_NO_MORE, ""]

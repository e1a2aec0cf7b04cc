"""The places of `embedctl up`: a gateway and a worker in quarantine, played by shells, and when one is restarted."""

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
from embedctl_workers.supervising.restarts import Pace, Restarts, how_it_ended, makes_suspect
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

    def say_why_not(self, place: str, why: str, name: str, hardware: str, models: Sequence[str]) -> None: ...

    def report_exit(self, pid: int, how: str | None) -> None:
        self.told.append("it reported its end" if how is None else how)


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
    quarantine._look = lambda: None  # type: ignore[method-assign]
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
    assert (quarantine.starts, quarantine.pause(), told(quarantine)) == (
        1,
        None,
        [AWAITED, AWAITED_NO_MORE, "it reported its end"],
    )


def test_nothing_waits_for_a_quarantine_that_is_stopped_or_dies_with_nothing_in_hand(quarantine: Shell) -> None:
    quarantine.want()
    quarantine.tend_until(lambda: quarantine.restarts.ready_at is not None)
    quarantine.want()  # its heartbeats say now that it is there
    assert quarantine.process
    quarantine.process.kill()
    quarantine.tend_until(lambda: quarantine.starts == 2)
    drain([quarantine], "", time.sleep, lambda: False)
    died = [AWAITED_NO_MORE, "killed by SIGKILL", AWAITED_NO_MORE, ""]
    assert told(quarantine) == [AWAITED, AWAITED_NO_MORE, *died]


CRASHED, SETTINGS, NO_MODEL, NOT_ACCURATE, NO_REDIS, HUNG, NOT_PERMITTED = 1, 2, 4, 65, 69, 70, 77


def test_five_deaths_at_start_in_a_row_are_enough() -> None:
    restarts = Restarts(Pace())
    for deaths in range(1, 6):
        assert restarts.given_up is None
        restarts.on_start()
        restarts.on_exit(CRASHED, 0.0)
        assert restarts.failed_starts == deaths
    assert restarts.given_up == CRASHED


@pytest.mark.parametrize("status", [SETTINGS, NO_MODEL, NOT_ACCURATE, NOT_PERMITTED])
def test_what_another_try_would_not_mend_is_given_up_at_once(status: int) -> None:
    restarts = Restarts(Pace())
    restarts.on_start()
    restarts.on_exit(status, 0.0)
    assert restarts.given_up == status


def test_a_worker_that_was_ready_is_never_given_up_for_how_it_ended() -> None:
    restarts = Restarts(Pace())
    for status in (SETTINGS, NOT_ACCURATE, HUNG, CRASHED, 0, -signal.SIGKILL) * 3:
        restarts.on_start()
        restarts.on_ready(0.0)
        restarts.on_exit(status, 1.0)
    assert restarts.given_up is None


def test_a_redis_that_is_away_is_waited_for() -> None:
    restarts = Restarts(Pace())
    for _ in range(50):
        restarts.on_start()
        pause = restarts.on_exit(NO_REDIS, 0.0)
    assert restarts.given_up is None
    assert pause == 60


def test_the_pause_doubles_up_to_a_minute_and_begins_anew_after_a_stable_worker() -> None:
    restarts = Restarts(Pace())
    pauses = []
    for _ in range(8):
        restarts.on_start()
        restarts.on_ready(100.0)
        pauses.append(restarts.on_exit(-signal.SIGKILL, 101.0))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert restarts.next_at == 161.0
    restarts.on_start()
    restarts.on_ready(200.0)
    assert restarts.on_exit(-signal.SIGKILL, 230.0) == 1


def test_a_death_with_chunks_in_hand_has_no_pause_unless_several_in_a_row_completed_nothing() -> None:
    restarts = Restarts(Pace())

    def die(*, held: int = 1, completed: int = 0) -> float:
        restarts.on_start()
        restarts.on_ready(100.0)
        pause = restarts.on_exit(-signal.SIGSEGV, 101.0, held=held, completed=completed)
        assert restarts.next_at == 101.0 + pause
        return pause

    assert [die(completed=1) for _ in range(20)] == [0] * 20
    assert [die() for _ in range(7)] == [0, 0, 0, 0, 1, 2, 4]
    assert die(completed=1) == 0
    assert [die() for _ in range(4)] == [0] * 4
    assert die(held=0) == 8  # another kind of death, which is counted by itself
    assert [die() for _ in range(4)] == [0] * 4


def test_a_worker_that_held_chunks_had_started_even_if_nobody_saw_it() -> None:
    restarts = Restarts(Pace())
    for _ in range(50):
        restarts.on_start()
        restarts.on_exit(-signal.SIGSEGV, 0.0, held=1)
    assert (restarts.given_up, restarts.failed_starts) == (None, 0)


@pytest.mark.parametrize(
    ("status", "words", "suspect"),
    [
        (-signal.SIGKILL, "killed by SIGKILL", True),
        (-signal.SIGSEGV, "killed by SIGSEGV", True),
        (-40, "killed by signal 40", True),
        (-signal.SIGTERM, "killed by SIGTERM", False),
        (HUNG, "ended with status 70 (an encode hung)", True),
        (71, "ended with status 71 (it can encode nothing any more)", True),
        (CRASHED, "ended with status 1", None),
        (0, "ended with status 0", None),
    ],
)
def test_how_it_ended_decides_what_is_suspect(status: int, words: str, suspect: bool | None) -> None:
    assert how_it_ended(status) == words
    assert makes_suspect(status) is suspect
    by_kernel = " (out of memory)" if status == -signal.SIGKILL else ""
    assert how_it_ended(status, memory_ran_out=True) == words + by_kernel

"""When a worker that died is restarted, and when it is given up."""

from __future__ import annotations

import signal

import pytest

from embedctl_workers.supervising.restarts import Pace, Restarts, how_it_ended, makes_suspect

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
    assert die(held=0) == 8  # it is of another kind: the count begins anew
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
        (HUNG, "ended itself with status 70: an encode hung", True),
        (71, "ended itself with status 71: it can encode nothing any more", True),
        (CRASHED, "ended with status 1", None),
        (0, "ended with status 0", None),
    ],
)
def test_how_it_ended_decides_what_is_suspect(status: int, words: str, suspect: bool | None) -> None:
    assert how_it_ended(status) == words
    assert makes_suspect(status) is suspect

"""The thread that renews a process' leases."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from embedctl.store.lease import Lease
from embedctl_config.errors import BrokerUnavailable
from tests.support.waiting import eventually

T = TypeVar("T")


def renewing(renewed: list[T], each: T) -> Callable[[], bool]:
    """Renews a lease, and notes that."""

    def renew() -> bool:
        renewed.append(each)
        return True

    return renew


def test_leases_are_renewed_until_their_ends() -> None:
    renewed: list[str] = []
    with Lease(renewing(renewed, "one"), 0.01), Lease(renewing(renewed, "two"), 3600.0, 0.0) as two:
        eventually(lambda: renewed.count("one") > 3 and "two" in renewed)
        two.end()
    count = len(renewed)
    with Lease(renewing(renewed, "another"), 0.01):
        eventually(lambda: renewed.count("another") > 3)
    assert renewed.count("two") == 1
    assert set(renewed[count:]) == {"another"}


def test_a_lost_lease_is_told_and_renewed_no_more() -> None:
    answers: Iterator[bool] = iter([True, False])
    with Lease(lambda: next(answers), 0.01) as lease:
        assert lease.lost.wait(60)
        assert next(answers, None) is None
    renewed: list[int] = []
    with Lease(renewing(renewed, 1), 0.01):  # the thread goes on
        eventually(lambda: renewed)


def test_an_outage_and_a_mistake_keep_no_lease_from_its_next_renewal() -> None:
    faults = iter([BrokerUnavailable("away"), RuntimeError("a mistake")])
    renewed: list[int] = []

    def renew() -> bool:
        if fault := next(faults, None):
            raise fault
        return renewing(renewed, 1)()

    with Lease(renew, 0.01) as lease:
        eventually(lambda: renewed)
        assert not lease.lost.is_set()


def test_the_end_waits_for_a_renewal_in_progress() -> None:
    """Otherwise, a lease that was given up could be taken once more."""
    begun, over = threading.Event(), threading.Event()

    def renew() -> bool:
        begun.set()
        over.wait(0.2)  # shorter than the end's patience
        over.set()
        return True

    with Lease(renew, 3600.0, 0.0):
        assert begun.wait(60)
    assert over.is_set()


def test_a_child_renews_its_own_leases_alone() -> None:
    mine: list[int] = []
    with Lease(renewing(mine, os.getpid()), 0.01):
        eventually(lambda: mine)
        if not (child := os.fork()):
            its: list[int] = []
            with Lease(renewing(its, 1), 0.01):
                eventually(lambda: its)
            os._exit(0 if os.getpid() not in mine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""The gateway beside the workers of `embedctl up`, with a shell in its place."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from embedctl_config.errors import WorkerError
from embedctl_workers.supervising.places import GatewayPlace, drain
from embedctl_workers.supervising.restarts import Pace
from tests.support.processes import children
from tests.support.waiting import eventually

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


def test_it_is_started_again_after_a_pause_and_what_it_says_is_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
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

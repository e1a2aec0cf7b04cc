"""Whatever happens between any two questions of a wait, the wait ends, and with what happened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import redis as redis_py

from embedctl import Job, JobCancelled, JobLost, JobNotFound, JobState
from embedctl.broker import Broker
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.store import at_use, new_job, work
from tests.support.waiting import PATIENCE_S
from tests.support.waits import WAITS

#: Steps after which something happens: those of one look and of the next one's beginning.
STEPS = range(1, 7)


def finish(job_id: str, broker: Broker, raw: redis_py.Redis) -> None:
    work(broker, job_id, 1)
    broker.jobs.seal(job_id, 2)


def cancel(job_id: str, broker: Broker, raw: redis_py.Redis) -> None:
    Job(job_id, broker).cancel()


def discard(job_id: str, broker: Broker, raw: redis_py.Redis) -> None:
    Job(job_id, broker).discard()


def lose_a_chunk(job_id: str, broker: Broker, raw: redis_py.Redis) -> None:
    raw.hset(keys.job(job_id), mapping={"lost_first": 1, "lost_last": 1})


#: What happens → how each wait ends; `wait` returns the status of a cancelled job.
ENDS: dict[Callable[[str, Broker, redis_py.Redis], None], set[object]] = {
    finish: {JobState.COMPLETED, 2},
    cancel: {JobState.CANCELLED, JobCancelled},
    discard: {JobNotFound},
    lose_a_chunk: {JobLost},
}


@pytest.mark.slow
@pytest.mark.parametrize("happens", ENDS, ids=lambda happens: happens.__name__)
@pytest.mark.parametrize("call", WAITS)
def test_a_wait_ends_with_what_happens_between_any_two_of_its_steps(
    call: str,
    happens: Callable[[str, Broker, redis_py.Redis], None],
    settings: Settings,
    broker: Broker,
    raw: redis_py.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in STEPS:
        job_id = new_job(broker, 2, seal=False)
        work(broker, job_id, 0)
        waiting = Broker.connect(settings)
        at_use(step, waiting.connection, partial(happens, job_id, broker, raw), monkeypatch)
        try:
            found = WAITS[call](Job(job_id, waiting), PATIENCE_S)
            end: object = len(found) if isinstance(found, list) else found.state
        except (JobCancelled, JobNotFound) as error:
            end = type(error)
        finally:
            waiting.close()
        assert end in ENDS[happens], f"step {step}"

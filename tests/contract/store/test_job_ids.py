"""What is no job's id is never made part of a key, wherever it comes from."""

from __future__ import annotations

import pytest
import redis as redis_py

from embedctl.broker import Broker
from embedctl.enqueue import JobOptions, submit
from embedctl.job import Job
from embedctl_config import keys
from embedctl_config.errors import JobNotFound
from tests.support.store import new_job

ODD = ["", "*", "../../etc/passwd", "x:in:0", "20260731-235959-012345678g", "20260731-235959-0123456789:in:0", "a\nb"]


def test_the_ids_that_are_made_have_the_form(broker: Broker) -> None:
    assert keys.is_job_id(new_job(broker))


@pytest.mark.parametrize("job_id", ODD)
def test_what_has_another_form_is_not_asked_for(job_id: str, broker: Broker, raw: redis_py.Redis) -> None:
    raw.config_resetstat()
    with pytest.raises(JobNotFound):
        broker.jobs.status(job_id)
    with pytest.raises(JobNotFound):
        Job.get(job_id, broker.settings)
    with pytest.raises(JobNotFound):
        submit(broker, [], JobOptions(resume=job_id))
    assert broker.jobs.find([job_id]) == []
    asked = {name.removeprefix("cmdstat_") for name in raw.info("commandstats")}
    assert "get" in asked  # when the database was first used
    assert asked.isdisjoint({"hgetall", "exists", "evalsha", "keys", "scan"})

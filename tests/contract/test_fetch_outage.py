"""A fetch that Redis leaves in the middle is an outage, and not a file that can't be written."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from embedctl import patience
from embedctl.broker import Broker
from embedctl.job import Job
from embedctl.output.fetch import fetch
from embedctl_config.errors import BrokerUnavailable
from tests.contract.helpers import DIM, new_job, work


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.jsonl"])
def test_what_was_written_stays_and_the_next_fetch_goes_on(
    name: str, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = new_job(broker, 3)
    work(broker, job_id, 0, 1, 2)
    asked: list[int] = []
    away = [True]
    result = broker.jobs.result

    def answers(job_id: str, chunk: int) -> bytes | None:
        asked.append(chunk)
        if chunk == 2 and away:
            raise BrokerUnavailable("Redis went away")
        return result(job_id, chunk)

    monkeypatch.setattr(broker.jobs, "result", answers)
    monkeypatch.setattr(patience, "OUTAGE_S", -1.0)
    monkeypatch.setattr(sys.modules[fetch.__module__], "_NOTE_EVERY_S", 0.0)
    with pytest.raises(BrokerUnavailable, match="went away"):
        fetch(Job(job_id, broker), tmp_path / name)
    asked.clear()
    away.clear()
    fetch(Job(job_id, broker), tmp_path / name)
    assert 0 not in asked
    if name.endswith("npy"):
        assert np.load(tmp_path / name).shape == (6, DIM)
    else:
        assert len((tmp_path / name).read_text().splitlines()) == 6
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

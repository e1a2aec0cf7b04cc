"""What one version makes, programs of another leave alone, and say so."""

from __future__ import annotations

import pytest

from tests.support.here import Here
from tests.support.prepared import Put
from tests.support.waiting import eventually

#: This version with another number.
OTHER = Put({("embedctl_config.wire", "VERSION"): 2})


@pytest.mark.in_redis
def test_a_job_of_another_version_is_left_alone_until_its_own_worker_comes(here: Here) -> None:
    def stored() -> dict[bytes, object]:
        return {key: here.raw.dump(key) for key in here.raw.scan_iter(f"embed:job:{job_id}*")}

    (here.folder / "corpus.txt").write_text("one\ntwo\n")
    job_id = here.embedctl("submit", "corpus.txt", prepare=OTHER).stdout.strip()
    before = stored()
    worker = here.start_worker()
    eventually(lambda: worker.logged("its ticket is of version 2, and this worker handles version 1", job=job_id))
    eventually(lambda: f"{job_id} can't be looked after" in worker.log())
    for verb in ("status", "wait", "cancel"):
        told = here.embedctl(verb, job_id, status=1)
        assert "is of version 2, and this embedctl handles version 1" in told.stderr
    assert stored() == before
    assert worker.stop() == 0
    here.start_worker(prepare=OTHER)
    assert here.embedctl("wait", job_id, prepare=OTHER).returncode == 0

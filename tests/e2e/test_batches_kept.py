"""What a tenant may keep, beside batches and files that would need more of it than there is."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import redis

from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.batches import client_of, counts, create, ended, lines_of, rows_in, upload
from tests.support.gateway import Running, running_gateway
from tests.support.here import Here
from tests.support.waiting import eventually

MIB = 1024 * 1024
#: The requests of a batch, and the texts of each. Their vectors of 16 dimensions take more than nine tenths of what a
#: tenant may keep. Half of the requests take less, but with the answers to the other half they take more, too.
REQUESTS, TEXTS = 16, 2048


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.replace(hardware="dummy")


@pytest.fixture
def gateway(here: Here, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """One whose Redis has little room, beside a worker."""
    for name in ("_PAUSE_S", "_NO_ROOM_S", "_LOOK_S", "_CHECK_S"):
        monkeypatch.setattr(f"embedctl_gateway.batches.runner.{name}", 0.1)
    here.raw.config_set("maxmemory", 32 * MIB)
    try:
        here.start_worker()
        with running_gateway(here.settings) as running:
            yield running
    finally:
        here.raw.config_set("maxmemory", 0)


def requests(count: int) -> bytes:
    return lines_of([["a"] * TEXTS] * count)


def kept(raw: redis.Redis) -> int:
    """The bytes that count as kept of the tenant's jobs."""
    return int(raw.hget(keys.kept("default"), "sum") or 0)


def test_a_batch_that_its_tenant_could_never_keep_fails_and_says_how_it_would_not(here: Here, gateway: Running) -> None:
    with client_of(gateway) as client:
        batch = ended(client, create(client, upload(client, requests(REQUESTS))).id)
        assert batch.status == "failed"
        (error,) = (batch.errors.data if batch.errors else None) or []
        assert (error.code, error.line, error.param) == ("quota_exceeded", None, None)
        assert f"tenant default keeps at most {16 * MIB:,} in jobs and files" in (error.message or "")
        assert "divide it into at least 2" in (error.message or "")
        assert kept(here.raw) == 0
        assert here.raw.exists(keys.unfinished("default"), keys.DEADLINES) == 0


def test_batches_that_fit_one_after_the_other_do_not_wait_for_each_other_half_done(gateway: Running) -> None:
    with client_of(gateway) as client:
        first = create(client, upload(client, requests(REQUESTS // 2))).id
        eventually(lambda: client.batches.retrieve(first).status != "validating", what="its job")
        second = create(client, upload(client, requests(REQUESTS // 2))).id
        batch = ended(client, first)
        assert (batch.status, counts(batch)) == ("completed", (8, 8, 0))
        assert client.batches.retrieve(second).status == "validating"  # there is no room beside the answers
        assert batch.output_file_id is not None
        client.files.delete(batch.output_file_id)
        assert counts(ended(client, second)) == (8, 8, 0)


def test_a_file_that_could_never_be_kept_is_refused_for_good(gateway: Running) -> None:
    with client_of(gateway) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            upload(client, bytes(14 * MIB))
        assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
        assert f"more than {12 * MIB:,} bytes" in refused.value.message
        assert client.files.retrieve(upload(client, bytes(12 * MIB))).bytes == 12 * MIB


def test_what_is_known_to_be_too_much_only_when_it_is_there_ends_with_what_fits(here: Here, gateway: Running) -> None:
    url, text = "/embed_sparse", " ".join(f"word{number}" for number in range(40))
    with client_of(gateway) as client:
        lines = lines_of([[text] * TEXTS] * (REQUESTS // 2), url)
        batch = ended(client, create(client, upload(client, lines), url).id)
        assert batch.status == "completed"
        total, completed, failed = counts(batch)
        assert (total, completed + failed) == (REQUESTS // 2, REQUESTS // 2)
        assert completed
        assert failed
        rows = rows_in(client, batch.error_file_id)
        assert {row["error"]["code"] for row in rows.values()} == {"quota_exceeded"}
        eventually(lambda: kept(here.raw) == 0, what="the end of its job")

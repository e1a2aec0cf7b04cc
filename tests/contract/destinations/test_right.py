"""What syncs tell each other of the destination that they write."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from redis import Redis

from embedctl.destinations import right
from embedctl.destinations.right import announced
from embedctl.queueing.broker import Broker
from embedctl_config import keys
from embedctl_config.tenants import DEFAULT
from tests.support.waiting import eventually


def test_a_sync_that_redis_forgot_is_told_again(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SYNC_LEASE_S", 3.0)
    with announced(broker, "a table", DEFAULT):
        raw.flushall()
        eventually(lambda: raw.keys("embed:sync:*"))
    eventually(lambda: not raw.exists(keys.sync("a table")))


def test_the_second_is_told_once_the_first_ended(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SYNC_LEASE_S", 3.0)
    with ExitStack() as first, ExitStack() as second:
        assert not first.enter_context(announced(broker, "a table", DEFAULT))
        assert second.enter_context(announced(broker, "a table", DEFAULT))
        before = raw.get(keys.sync("a table"))
        first.close()
        eventually(lambda: raw.get(keys.sync("a table")) not in (None, before))


@pytest.mark.parametrize(("machine", "is_told"), [("here", False), ("elsewhere", True)])
def test_only_a_process_of_this_machine_is_known_to_have_died(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch, machine: str, is_told: bool
) -> None:
    monkeypatch.setattr(right, "machine_id", lambda: "here")
    raw.set(keys.sync("a table"), f"1767225600000 token {machine} 4194999.1 host", px=60_000)
    with announced(broker, "a table", DEFAULT) as other:
        assert ("process 4194999 on host, since 20" in other) is is_told
    with announced(broker, "another table", DEFAULT) as other:
        assert not other


def test_a_tenant_is_not_told_of_what_another_one_writes(broker: Broker) -> None:
    with announced(broker, "a table", "team/a"):
        for tenant, is_told in (("team/a", True), ("team/b", False), (DEFAULT, False)):
            with announced(broker, "a table", tenant) as other:
                assert bool(other) is is_told

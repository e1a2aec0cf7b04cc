"""What the doctor makes of what Redis says of itself."""

from __future__ import annotations

import dataclasses

import pytest

from embedctl.operating import doctor
from embedctl.operating.doctor import Level, limit_findings, redis_findings
from embedctl.store.quotas import Quota
from embedctl_config.tenants import TenantEntry

GOOD = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "auto-aof-rewrite-percentage": "100",
    "maxmemory-policy": "noeviction",
    "maxmemory": "4000000000",
    "lazyfree-lazy-eviction": "yes",
    "lazyfree-lazy-expire": "yes",
    "lazyfree-lazy-server-del": "yes",
}
MACHINE = 10_000_000_000
INFO = {"redis_version": "7.0.15", "used_memory": 1_000_000}


def levels(info: dict[str, object], config: dict[str, str]) -> dict[str, Level]:
    return {finding.subject: finding.level for finding in redis_findings(info, config, MACHINE)}


@pytest.mark.parametrize(
    ("setting", "value", "subject", "level"),
    [
        ("appendonly", "no", "persistence", Level.WARN),
        ("auto-aof-rewrite-percentage", "0", "AOF rewrite", Level.WARN),
        ("maxmemory-policy", "volatile-lru", "eviction", Level.FAIL),
        ("maxmemory", "7000000000", "memory", Level.WARN),
        ("maxmemory", "0", "memory", Level.WARN),
        ("lazyfree-lazy-expire", "no", "lazy freeing", Level.WARN),
    ],
)
def test_one_bad_setting_is_found_alone_and_has_a_remedy(setting: str, value: str, subject: str, level: Level) -> None:
    for finding in redis_findings(INFO, {**GOOD, setting: value}, MACHINE):
        is_bad = finding.subject == subject
        assert (finding.level, bool(finding.remedy)) == ((level, True) if is_bad else (Level.OK, False))


@pytest.mark.parametrize(
    ("info", "subject", "level"),
    [
        ({"redis_version": "6.0.16"}, "redis version", Level.FAIL),
        ({"redis_version": "6.2.0"}, "redis version", Level.OK),
        ({"redis_version": "10.1.0"}, "redis version", Level.OK),
        ({"redis_mode": "cluster"}, "redis mode", Level.FAIL),
        ({"cluster_enabled": 1}, "redis mode", Level.FAIL),
        ({}, "redis mode", Level.OK),
    ],
)
def test_an_old_version_and_a_cluster_are_faults(info: dict[str, object], subject: str, level: Level) -> None:
    assert levels({**INFO, **info}, GOOD)[subject] is level


def test_a_redis_that_hides_its_settings_is_judged_by_what_it_says_of_itself() -> None:
    told = {"aof_enabled": 1, "maxmemory": 4_000_000_000, "maxmemory_policy": "noeviction"}
    found = levels({**INFO, **told}, {})
    assert set(found) == {"redis version", "redis mode", "redis settings", "persistence", "eviction", "memory"}
    assert set(found.values()) == {Level.OK}
    bad = levels({**INFO, "aof_enabled": 0, "maxmemory": 0, "maxmemory_policy": "allkeys-lru"}, {})
    assert (bad["persistence"], bad["eviction"], bad["memory"]) == (Level.WARN, Level.FAIL, Level.WARN)


@pytest.mark.parametrize(
    ("info", "config", "level"),
    [
        ({"connected_clients": 7000, "maxclients": 10000}, {}, Level.OK),
        ({"connected_clients": 7001, "maxclients": 10000}, {}, Level.WARN),
        ({"connected_clients": 3000}, {"maxclients": "4064"}, Level.WARN),
        ({"connected_clients": 3000}, {}, None),
    ],
)
def test_connections_have_a_limit(info: dict[str, int], config: dict[str, str], level: Level | None) -> None:
    assert levels({**INFO, **info}, {**GOOD, **config}).get("connections") is level


QUOTA = Quota("a", "w@h", {"max_jobs": 5}, {"max_jobs": 2, "max_waiting_records": 0, "max_waiting_bytes": 0})


@pytest.mark.parametrize(
    ("tenants", "quotas", "level", "says"),
    [
        ({}, [QUOTA], Level.OK, "2 of 5 (max_jobs), of worker w@h"),
        ({}, [dataclasses.replace(QUOTA, limits={"max_jobs": 2})], Level.WARN, "2 of 2 (max_jobs), of worker w@h"),
        (
            {"a": TenantEntry(max_jobs=7)},
            [QUOTA],
            Level.WARN,
            "2 of 5 (max_jobs), of worker w@h; the settings here say: max_jobs 7",
        ),
        ({"a": TenantEntry(max_jobs=7)}, [], Level.WARN, "no limits; the settings here say: max_jobs 7"),
    ],
)
def test_a_tenant_s_limits_are_shown_with_what_it_has_and_with_other_settings(
    tenants: dict[str, TenantEntry], quotas: list[Quota], level: Level, says: str
) -> None:
    (finding,) = limit_findings(tenants, quotas)
    assert (finding.subject, finding.level, finding.found) == ("tenant a", level, says)
    assert bool(finding.remedy) is (level is Level.WARN)


@pytest.mark.parametrize("is_installed", [True, False])
def test_gpus_that_workers_can_not_find_come_with_a_remedy(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: object() if is_installed else None)
    seen = [("gpu", "NVIDIA GPUs", 2), ("gpu", "AMD GPUs", 1)]
    assert [each.remedy for each in doctor._devices(seen)] == [
        "",
        "" if is_installed else "workers here find them with nvidia-ml-py: pip install 'embedctl[gpu]'",
        "",
    ]

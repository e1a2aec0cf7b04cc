"""CPU quotas of control groups, in the files that their two versions have."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from embedctl_workers.machine import cgroup

V2 = "0::/system.slice/embedctl.service\n"
V1 = "9:name=systemd:/\n4:memory:/a\n3:cpu,cpuacct:/docker/abc\n"


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(cgroup, "_MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def member_of(mount: Path, membership: str) -> None:
    (mount.parent / "membership").write_text(membership)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def write_v1(group: Path, quota: str, period: str = "100000") -> None:
    write(group / "cpu.cfs_quota_us", quota)
    write(group / "cpu.cfs_period_us", period)


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("max 100000", math.inf),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("nonsense", math.inf),
        ("100000 0", math.inf),
    ],
)
def test_version_2_grants_a_quota_in_a_period(mount: Path, text: str, quota: float) -> None:
    member_of(mount, V2)
    write(mount / "system.slice" / "embedctl.service" / "cpu.max", text)
    assert cgroup.cpu_quota() == quota


@pytest.mark.parametrize("folder", ["cpu,cpuacct/docker/abc", "cpu/docker/abc", "cpu"])
def test_version_1_does_so_in_two_files_wherever_it_is_mounted(mount: Path, folder: str) -> None:
    member_of(mount, V1)
    write_v1(mount / folder, "300000")
    assert cgroup.cpu_quota() == 3


def test_the_least_of_a_group_and_all_above_it_counts(mount: Path) -> None:
    member_of(mount, V2)
    write(mount / "system.slice" / "embedctl.service" / "cpu.max", "800000 100000")
    write(mount / "system.slice" / "cpu.max", "400000 100000")
    assert cgroup.cpu_quota() == 4


@pytest.mark.parametrize("membership", ["0::/\n", "0::/../../host/path\n", "0::/of/the/host\n"])
def test_a_container_finds_its_own_quota_at_the_top(mount: Path, membership: str) -> None:
    member_of(mount, membership)
    write(mount / "cpu.max", "200000 100000")
    assert cgroup.cpu_quota() == 2


def test_without_control_groups_there_is_no_quota(mount: Path) -> None:
    assert cgroup.cpu_quota() == math.inf

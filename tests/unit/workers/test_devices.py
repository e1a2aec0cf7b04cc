"""CPUs, threads and accelerators of a process, the quotas of its control groups, and the bound for its memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl_config.errors import SettingsError, WorkerError
from embedctl_workers.machine import cgroup, devices, teams
from tests.support.machines import fake_topology

FIRST = min(os.sched_getaffinity(0))

PIN = """
import json, os, threading
from embedctl_workers.machine import devices, teams
pinned = devices.pin({cpus!r})
seen = []
thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
thread.start(); thread.join()
print(json.dumps({{
    "cpus": sorted(pinned.cpus), "threads": pinned.threads, "label": pinned.label,
    "device": pinned.device, "affinity": sorted(os.sched_getaffinity(0)), "of a thread": seen[0],
    "variables": [os.environ.get(name) for name in devices.THREAD_VARIABLES],
    "tokenizers": os.environ.get("TOKENIZERS_PARALLELISM"), "silence": os.environ.get(devices.SILENCE_VARIABLE),
}}))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0,2", {0, 2}), ("5-5,1,2-3", {1, 2, 3, 5}), ("1,1", {1})]
)
def test_lists_of_cpus_are_read(text: str, cpus: set[int]) -> None:
    assert devices.parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "x", "0-", "-1", "3-1", "0,", "0--2", "1.5", "0 1", "0,3-1", "0-2-4", "all"])
def test_what_is_no_list_of_cpus_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match="such as 0-3"):
        devices.parse_cpus(text)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_cpus_written_and_read_are_the_same(cpus: set[int]) -> None:
    assert devices.parse_cpus(devices.format_cpus(cpus)) == cpus


def test_pinning_restricts_the_process_and_the_thread_pools_to_come() -> None:
    done = python(PIN.format(cpus=str(FIRST)))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cpus"] == found["affinity"] == found["of a thread"] == [FIRST]
    assert (found["threads"], found["label"], found["device"]) == (1, str(FIRST), f"cpu {FIRST}")
    assert found["variables"] == ["1"] * len(devices.THREAD_VARIABLES)
    assert (found["tokenizers"], found["silence"]) == ("false", "1")


def test_pinning_is_refused_once_thread_pools_were_sized() -> None:
    with pytest.raises(WorkerError, match="was imported before the worker was pinned"):
        devices.pin(None)


def granted(monkeypatch: pytest.MonkeyPatch, quota: float) -> None:
    monkeypatch.setattr(devices, "cpu_quota", lambda: quota)


@pytest.fixture
def hyper_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two cores with two hyper-threads each, and one of another package."""
    granted(monkeypatch, math.inf)
    folder = fake_topology(tmp_path, {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1), 4: (1, 0)})
    monkeypatch.setattr(devices, "_CPU_FOLDER", folder)


@pytest.mark.usefixtures("hyper_threads")
def test_a_core_has_those_of_its_hyper_threads_that_were_asked_for_and_one_compute_thread() -> None:
    assert devices.cores_of({3, 2, 1, 0}) == [{0, 2}, {1, 3}]
    assert devices.cores_of({0, 1, 3}) == [{0}, {1, 3}]
    assert [devices.thread_count(cpus) for cpus in ({0, 2}, {0, 4}, {7, 8, 9})] == [1, 2, 3]


@pytest.mark.usefixtures("hyper_threads")
def test_each_compute_thread_has_a_core_of_its_own_unless_there_are_more_cores() -> None:
    cpus = frozenset({0, 1, 2, 3})
    assert devices.Pinned(cpus, threads=2).places == (frozenset({0, 2}), frozenset({1, 3}))
    assert devices.Pinned(cpus, threads=1).places == ()  # within a quota: which cores are free, the system knows
    assert devices.Pinned(cpus, 2, devices.Accelerator("gpu", 0, "GPU-0")).places == ()


@pytest.mark.parametrize(("quota", "threads"), [(math.inf, 4), (2, 2), (1, 1), (9, 4)])
def test_a_quota_bounds_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: float, threads: int) -> None:
    monkeypatch.setattr(devices, "_CPU_FOLDER", tmp_path)
    granted(monkeypatch, quota)
    assert devices.thread_count({0, 1, 2, 3}) == threads


GPU, CORE = devices.Accelerator("gpu", 3, "GPU-5ab0"), devices.Accelerator("neuron", 7, "7")
GROWING, OF_USER = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}


@pytest.mark.parametrize(
    ("accelerator", "set_already", "expected"),
    [
        (GPU, {}, {"CUDA_VISIBLE_DEVICES": "GPU-5ab0", **GROWING}),
        (GPU, OF_USER, {"CUDA_VISIBLE_DEVICES": "GPU-5ab0", **OF_USER}),
        (CORE, {}, {"NEURON_RT_VISIBLE_CORES": "7"}),
    ],
)
def test_an_accelerator_hides_all_others_and_a_gpus_memory_is_in_segments_that_grow(
    accelerator: devices.Accelerator,
    set_already: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(set_already))
    accelerator.hide_others()
    accelerator.let_segments_grow()
    assert os.environ == expected


def test_an_amd_gpu_is_chosen_where_uuids_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3", "ROCR_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setattr(os, "environ", hidden)
    devices.Accelerator("gpu", 1, "GPU-b7d181671a192e45", rocm=True).hide_others()
    assert os.environ == {"ROCR_VISIBLE_DEVICES": "GPU-b7d181671a192e45"}


def test_what_can_not_be_had_is_named() -> None:
    code = "from embedctl_workers.machine import devices; devices.pin({!r}, threads=2)"
    assert f"SettingsError: --threads 2: only the CPUs {FIRST}" in python(code.format(str(FIRST))).stderr
    assert "no CPU 4095 here" in python(code.format(f"{FIRST},4095")).stderr


def test_a_thread_encodes_on_where_the_cpus_of_its_team_were_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's CPUs may change while a worker runs."""
    monkeypatch.setattr(teams, "_bound", (frozenset({4094}), frozenset({4095})))
    before = os.sched_getaffinity(0)
    with teams.OwnPlace():
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


PLACES = (frozenset({0, 2}), frozenset({1}))
OF_USERS = ("OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, str]]]:
    """The variables of GNU OpenMP that the library saw, each time it was loaded."""
    seen: list[dict[str, str]] = []
    for name in OF_USERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(teams, "openmp_runtimes", list)
    monkeypatch.setattr(
        teams,
        "load_openmp",
        lambda: seen.append({name: os.environ[name] for name in OF_USERS if name in os.environ}),
    )
    monkeypatch.setattr(teams, "_bound", ())
    yield seen
    assert teams._bound == (), "the stand-in bound nothing"


def test_the_library_is_told_the_places_and_nobody_else_is(told: list[dict[str, str]]) -> None:
    teams.bind(PLACES)
    assert told == [{"OMP_PLACES": "{0,2},{1}", "OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "active"}]
    assert not any(name in os.environ for name in OF_USERS)


@pytest.mark.parametrize("variable", OF_USERS)
def test_a_users_variable_wins(told: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0")
    teams.bind(PLACES)
    assert told == []
    assert os.environ[variable] == "0"


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


def test_version_2_tells_what_memory_is_left_and_whom_its_lack_killed(mount: Path) -> None:
    member_of(mount, V2)
    service = mount / "system.slice" / "embedctl.service"
    for name, text in {
        "max": "1000",
        "current": "700",
        "stat": "anon 1\ninactive_file 50",
        "events": "oom 9\noom_kill 3",
    }.items():
        write(service / f"memory.{name}", text)
    assert (cgroup.memory_left(), cgroup.killed_for_memory()) == (350, 3)
    write(service / "memory.max", "max")
    assert cgroup.memory_left() == math.inf


def test_version_1_does_so_too(mount: Path) -> None:
    member_of(mount, V1.replace("cpu,cpuacct", "memory"))
    group = mount / "memory"
    facts = {
        "limit_in_bytes": "1000",
        "usage_in_bytes": "700",
        "stat": "inactive_file 1\ntotal_inactive_file 50",
        "oom_control": "under_oom 0\noom_kill 3",
    }
    for name, text in facts.items():
        write(group / f"memory.{name}", text)
    assert (cgroup.memory_left(), cgroup.killed_for_memory()) == (350, 3)
    write(group / "memory.limit_in_bytes", str(2**63 - 4096))
    assert cgroup.memory_left() == math.inf


def test_without_control_groups_nothing_is_limited(mount: Path) -> None:
    assert (cgroup.cpu_quota(), cgroup.memory_left(), cgroup.killed_for_memory()) == (math.inf, math.inf, 0)


#: Given what its group has left in GiB, says what became of allocations of these sizes, which are never touched.
BOUNDED = """
import sys
import numpy as np
from embedctl_workers.machine import cgroup
group, *sizes = map(float, sys.argv[1:])
cgroup.memory_left = lambda: group * 2**30
cgroup.bound_memory()
for size in sizes:
    try:
        np.empty(int(size * 2**30), np.uint8)
        print("had")
    except MemoryError:
        print("refused")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux bounds what a process has to itself")
@pytest.mark.parametrize("group", ["inf", "0.7"])
def test_what_is_asked_for_beyond_the_bound_is_refused_and_the_process_goes_on(group: str) -> None:
    total = cgroup._bytes_in(cgroup._MACHINE, "MemTotal") / 2**30
    # Most of what there is, at least; and in a group, what it has not left.
    sizes = [group, "0.5", str(0.75 * total) if group == "inf" else "0.75", "0.5"]
    done = subprocess.run([sys.executable, "-c", BOUNDED, *sizes], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["had", "refused", "had"]

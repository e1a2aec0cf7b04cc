"""CPUs: reading them, writing them, and pinning a process before anything sizes a thread pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl_config.errors import SettingsError
from embedctl_workers import devices

FIRST = min(os.sched_getaffinity(0))

PIN = """
import json, os, threading
from embedctl_workers import devices
pinned = devices.pin({cpus!r})
seen = []
thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
thread.start(); thread.join()
print(json.dumps({{
    "cpus": sorted(pinned.cpus), "threads": pinned.threads, "label": pinned.label,
    "affinity": sorted(os.sched_getaffinity(0)), "of a thread": seen[0],
    "variables": [os.environ.get(name) for name in devices.THREAD_VARIABLES],
    "tokenizers": os.environ.get("TOKENIZERS_PARALLELISM"),
}}))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0,2", {0, 2}), ("5-5,1,2-3", {1, 2, 3, 5}), ("1,1", {1})],
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


def test_neighbours_are_written_as_a_span() -> None:
    assert devices.format_cpus({8, 0, 1, 2, 3}) == "0-3,8"
    assert devices.format_cpus(set()) == ""


def test_pinning_restricts_the_process_and_the_thread_pools_to_come() -> None:
    done = python(PIN.format(cpus=str(FIRST)))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cpus"] == found["affinity"] == found["of a thread"] == [FIRST]
    assert (found["threads"], found["label"]) == (1, str(FIRST))
    assert found["variables"] == ["1"] * len(devices.THREAD_VARIABLES)
    assert found["tokenizers"] == "false"


def test_pinning_to_nothing_in_particular_takes_what_there_is() -> None:
    done = python(PIN.format(cpus=None))
    found = json.loads(done.stdout)
    assert found["cpus"] == sorted(os.sched_getaffinity(0))
    assert 1 <= found["threads"] <= len(found["cpus"])


@pytest.mark.parametrize("module", ["numpy"])
def test_pinning_is_refused_once_thread_pools_were_sized(module: str) -> None:
    done = python(f"import {module}\n" + PIN.format(cpus=None))
    assert done.returncode != 0
    assert f"WorkerError: {module} was imported before the worker was pinned" in done.stderr


def test_nothing_that_a_worker_imports_before_pinning_sizes_a_thread_pool() -> None:
    done = python("import embedctl_workers.cli\n" + PIN.format(cpus=str(FIRST)))
    assert done.returncode == 0, done.stderr


def test_cpus_that_are_not_there_are_named() -> None:
    done = python(PIN.format(cpus=f"{FIRST},4095"))
    assert done.returncode != 0
    assert "no CPU 4095 here" in done.stderr
    assert devices.format_cpus(os.sched_getaffinity(0)) in done.stderr


def fake_topology(folder: Path, cores: dict[int, tuple[int, int]]) -> Path:
    for cpu, (package, core) in cores.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder


@pytest.fixture
def no_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(devices, "_CGROUP_QUOTA", quota)
    return quota


def test_hyper_threads_of_a_core_share_one_compute_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_quota: Path
) -> None:
    folder = fake_topology(tmp_path, {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1), 4: (1, 0)})
    monkeypatch.setattr(devices, "_CPU_FOLDER", folder)
    assert devices.thread_count({0, 2}) == 1
    assert devices.thread_count({0, 1, 2, 3}) == 2
    assert devices.thread_count({0, 4}) == 2
    assert devices.thread_count({7, 8, 9}) == 3


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 4), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("nonsense", 4)],
)
def test_the_cgroups_quota_bounds_the_compute_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_quota: Path, quota: str, threads: int
) -> None:
    monkeypatch.setattr(devices, "_CPU_FOLDER", tmp_path)
    no_quota.write_text(quota + "\n")
    assert devices.thread_count({0, 1, 2, 3}) == threads

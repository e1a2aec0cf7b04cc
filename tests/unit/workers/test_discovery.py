"""What is found on machines of all kinds, and what reports say of them: tools and the kernel's files are played."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embedctl_config.cpu import cpu_name
from embedctl_config.errors import SettingsError, WorkerError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.machine import devices, discovery, nvidia, provenance
from embedctl_workers.machine.devices import Accelerator, Pinned
from embedctl_workers.machine.discovery import CpuSet
from tests.support.fakes import pynvml as fake_pynvml
from tests.support.machines import GPUS, UUIDS, fake_topology, play, play_gpus

Play = Callable[..., None]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is all of PATH; no variable hides a device."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(discovery, "_NEURON_TOOLS", str(tmp_path / "aws"))
    monkeypatch.setattr(discovery, "_ROCM_TOOLS", str(tmp_path / "rocm"))
    monkeypatch.setattr(discovery, "_PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(nvidia, "_DEVICES", tmp_path / "dev")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.delenv(variable, raising=False)
    return folder


@pytest.fixture
def play_nvidia(tools: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Put NVIDIA's driver into the machine, as `play_gpus`."""

    def played(gpus: Sequence[Mapping[str, Any]] = (), **fails: str) -> None:
        play_gpus(tools, gpus, **fails)
        monkeypatch.syspath_prepend(str(tools))
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    return played


def test_a_machine_without_tools_has_cpus_only(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    machine = discovery.discover()
    assert (machine.gpus, machine.neuron_cores, machine.problems) == ([], [], {})
    assert frozenset().union(*(each.cpus for each in machine.cpu_sets)) == os.sched_getaffinity(0)


def test_gpus_are_found_with_the_nodes_that_they_are_near(play_nvidia: Play, tmp_path: Path) -> None:
    play_nvidia(GPUS)
    for address, node in (("0000:07:00.0", "0"), ("0000:0f:00.0", "-1"), ("0001:47:00.0", "1")):
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "numa_node").write_text(f"{node}\n")
    name = "NVIDIA A100-SXM4-80GB"
    assert discovery.find_gpus() == [
        Accelerator("gpu", 0, UUIDS[0], name, 0, memory=81920),
        Accelerator("gpu", 1, UUIDS[1], name, None, memory=81920),
        Accelerator("gpu", 2, UUIDS[2], name, 1, memory=81920),
    ]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-11", [0]),
        (UUIDS[1], [1]),
        ("0,7,1", [0]),
        ("0,GPU-22", [0]),  # two begin like that
        ("NoDevFiles", []),
    ],
)
def test_what_is_hidden_from_this_process_is_not_found(
    play_nvidia: Play, monkeypatch: pytest.MonkeyPatch, visible: str, indices: list[int]
) -> None:
    play_nvidia(GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in discovery.find_gpus()] == indices


#: As in AMD's documentation of `amd-smi list -e`; numbers of the tool and of HIP differ.
AMD_SMI = [
    {"gpu": 0, "bdf": "0000:83:00.0", "uuid": "9fff74b9-0000-1000-8044-4a2fb30adeb0", "kfd_id": 43855, "node_id": 9}
    | {"partition_id": 0, "render": "renderD185", "card": "card57", "hsa_id": 9, "hip_id": 1}
    | {"hip_uuid": "GPU-9f444a2fb30adeb0"},
    {"gpu": 1, "bdf": "0000:8b:00.0", "uuid": "b7ff74b9-0000-1000-80d1-81671a192e45", "kfd_id": 27976, "node_id": 8}
    | {"partition_id": 0, "render": "renderD177", "card": "card49", "hsa_id": 8, "hip_id": 0}
    | {"hip_uuid": "GPU-b7d181671a192e45"},
]


def test_amd_gpus_are_found_in_the_order_of_hip(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "pci" / "0000:8b:00.0").mkdir(parents=True)
    (tmp_path / "pci" / "0000:8b:00.0" / "numa_node").write_text("1\n")
    expected = [
        Accelerator("gpu", 1, "GPU-b7d181671a192e45", "AMD GPU", 1, rocm=True),
        Accelerator("gpu", 0, "GPU-9f444a2fb30adeb0", "AMD GPU", None, rocm=True),
    ]
    play(tmp_path / "rocm" / "amd-smi", json.dumps(AMD_SMI))
    assert discovery.find_gpus() == expected


@pytest.mark.parametrize(
    ("variables", "indices"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-9f444a2fb30adeb0, 0"}, [0, 1]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-9f444a2fb30adeb0,0", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "1,7,0"}, [0]),
    ],
)
def test_amd_gpus_that_are_hidden_are_not_found(
    tools: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], indices: list[int]
) -> None:
    play(tools / "amd-smi", json.dumps(AMD_SMI))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [gpu.index for gpu in discovery.find_gpus()] == indices


PARTS = [("aaaa", "3g.40gb"), ("bbbb", "1g.10gb")]
#: The first GPU is divided, the others are whole.
DIVIDED = [
    {**GPUS[0], "parts": [{"uuid": f"MIG-{uuid}", "name": f"{GPUS[0]['name']} MIG {size}"} for uuid, size in PARTS]},
    *GPUS[1:],
]


@pytest.mark.parametrize(
    ("visible", "uids"),
    [
        (None, ["MIG-aaaa", "MIG-bbbb", UUIDS[1], UUIDS[2]]),
        ("0", ["MIG-aaaa", "MIG-bbbb"]),
        ("1,0", [UUIDS[1], "MIG-aaaa", "MIG-bbbb"]),
        ("MIG-bbbb", ["MIG-bbbb"]),
        ("MIG-bbbb,MIG-none,1", ["MIG-bbbb", "MIG-none", UUIDS[1]]),
    ],
)
def test_each_part_of_a_divided_gpu_is_one(
    play_nvidia: Play, monkeypatch: pytest.MonkeyPatch, visible: str | None, uids: list[str]
) -> None:
    play_nvidia(DIVIDED)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = discovery.find_gpus()
    assert [gpu.uid for gpu in found] == uids
    (part,) = (gpu for gpu in found if gpu.uid == "MIG-bbbb")
    assert (part.index, part.name) == (0, "NVIDIA A100-SXM4-80GB MIG 1g.10gb")


@pytest.mark.parametrize("step", ["init", "handle"])
def test_a_driver_that_fails_is_quoted_and_hides_no_cpu(play_nvidia: Play, step: str, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    play_nvidia(GPUS, **{step: "RM has detected an NVML/RM version mismatch."})
    with pytest.raises(WorkerError, match="NVIDIA's driver says: RM has detected"):
        discovery.find_gpus()
    machine = discovery.discover()
    assert machine.gpus == []
    assert "NVIDIA's driver says: RM has detected" in machine.problems["gpu"]
    assert machine.cpu_sets


def test_without_their_gpu_nobody_needs_nvidias_driver(tools: Path, play_nvidia: Play, tmp_path: Path) -> None:
    assert discovery.find_gpus() == []
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    with pytest.raises(WorkerError, match=r"not found: the package nvidia-ml-py is not installed: pip install 'emb"):
        discovery.find_gpus()
    (tmp_path / "dev" / "nvidia0").unlink()
    play_nvidia(init="NVML Shared Library Not Found")
    assert discovery.find_gpus() == []


def test_the_stand_in_for_nvidias_package_has_its_names_and_arguments() -> None:
    real, fake = (
        {name: each for name, each in vars(module).items() if name.startswith(("nvml", "NVML"))}
        for module in (importlib.import_module("pynvml"), fake_pynvml)
    )
    for name, each in fake.items():
        if isinstance(each, int):
            assert each == real[name]
        elif isinstance(each, type):
            assert issubclass(real[name], real["NVMLError"])
        else:
            assert list(inspect.signature(each).parameters) == list(inspect.signature(real[name]).parameters), name


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (b"#!/bin/sh\necho no device; exit 9\n", "neuron-ls fails with status 9 and says: no device"),
        (b"#!/bin/sh\nexec /bin/sleep 60\n", r"no answer in 0\.2 s"),
        (b"\x7fELF", "neuron-ls can't be run"),
    ],
)
def test_a_useless_tool_is_quoted(tools: Path, tool: bytes, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "neuron-ls").write_bytes(tool)
    (tools / "neuron-ls").chmod(0o755)
    monkeypatch.setattr(discovery, "_TOOL_S", 0.2)
    with pytest.raises(WorkerError, match=told) as raised:
        discovery.find_neuron_cores()
    assert discovery.discover().problems["neuron"] == str(raised.value)


NEURON = [
    {"neuron_device": 1, "bdf": "00:1f.0", "nc_count": 2, "neuroncore_ids": [2, 3], "numa_node": "1"},
    {"neuron_device": 0, "bdf": "00:1e.0", "nc_count": 2, "neuroncore_ids": [0, 1], "numa_node": "-1"},
]
#: Older tools name no cores.
OLDER = [{name: value for name, value in each.items() if name in ("neuron_device", "nc_count")} for each in NEURON]


@pytest.mark.parametrize(("answer", "nodes"), [(NEURON, [None, None, 1, 1]), (OLDER, [None] * 4)])
def test_neuron_cores_are_counted(tools: Path, answer: list[dict[str, object]], nodes: list[int | None]) -> None:
    play(tools / "neuron-ls", json.dumps(answer))
    found = discovery.find_neuron_cores()
    assert [(core.kind, core.index, core.uid) for core in found] == [("neuron", at, str(at)) for at in range(4)]
    assert [core.node for core in found] == nodes


def test_hidden_neuron_cores_are_not_found(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tools / "neuron-ls", json.dumps(NEURON))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "1-2")
    assert [core.index for core in discovery.find_neuron_cores()] == [1, 2]
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "one")
    with pytest.raises(SettingsError, match="NEURON_RT_VISIBLE_CORES 'one'"):
        discovery.find_neuron_cores()


@pytest.mark.parametrize(
    ("tool", "answer"),
    [
        *(("neuron-ls --json-output", said) for said in ("", "no JSON", "{}x", "[1]", '{"neuron_devices": []}')),
        *(("neuron-ls --json-output", said) for said in ('[{"nc_count": 2}]', '[{"neuron_device": 0}]')),
        *(("amd-smi list -e --json", said) for said in ("hello", "[1]", '[{"gpu": 0, "bdf": "x", "hip_id": 0}]')),
        ("amd-smi list -e --json", '[{"gpu": 0, "hip_id": 0, "hip_uuid": "N/A"}]'),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(tools: Path, tool: str, answer: str) -> None:
    name = tool.split()[0]
    play(tools / name, answer + "\n")
    find = discovery.find_neuron_cores if name == "neuron-ls" else discovery.find_gpus
    with pytest.raises(WorkerError, match=f"{tool} printed output that can't be parsed"):
        find()


def choose(device: str, gpu: str | None = None, neuron_core: int | None = None) -> Accelerator | None:
    return discovery.choose_accelerator("mine", device, gpu=gpu, neuron_core=neuron_core)  # type: ignore[arg-type]  # any text


@pytest.mark.parametrize(
    ("device", "gpu", "core", "told"),
    [
        ("cpu", "0", None, '--gpu 0: class mine runs on a CPU: leave --gpu out, or choose a class with device = "gpu"'),
        ("cpu", None, 0, "--neuron-core 0: class mine runs on a CPU"),
        ("gpu", None, 0, "--neuron-core 0: class mine runs on a GPU"),
        ("gpu", "7", None, f"--gpu 7: there is no such GPU. Here: 0 ({UUIDS[0]}), 1 "),
        ("gpu", "GPU-22", None, "--gpu GPU-22: several match"),
        ("gpu", None, None, "class mine runs on one GPU, and there are 3: choose one with --gpu, or start `emb"),
        ("neuron", None, None, "class mine needs a Neuron core, and none is found here: neuron-ls shows none"),
    ],
)
def test_a_choice_with_no_device(play_nvidia: Play, device: str, gpu: str | None, core: int | None, told: str) -> None:
    play_nvidia(GPUS)
    with pytest.raises(SettingsError) as raised:
        choose(device, gpu, core)
    assert told in str(raised.value)


def test_the_only_accelerator_need_not_be_named(play_nvidia: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    play_nvidia(GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert choose("gpu") == Accelerator("gpu", 2, UUIDS[2], "NVIDIA A100-SXM4-80GB", memory=81920)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SettingsError, match="the driver shows none that CUDA_VISIBLE_DEVICES leaves visible"):
        choose("gpu")
    assert choose("cpu") is None


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two nodes of two cores with two hyper-threads each, numbered as Linux does, and one that has memory only."""
    cores = {cpu: (cpu % 4 // 2, cpu % 2) for cpu in range(8)}
    monkeypatch.setattr(devices, "_CPU_FOLDER", fake_topology(tmp_path / "cpu", cores))
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7", "")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(discovery, "_NODES", tmp_path / "node")
    return tmp_path / "node"


def grant(monkeypatch: pytest.MonkeyPatch, quota: float) -> None:
    monkeypatch.setattr(discovery, "cpu_quota", lambda: quota)


def found(cpus: set[int]) -> list[tuple[list[set[int]], int, int | None]]:
    sets = discovery.find_cpu_sets(frozenset(cpus))
    return [([set(core) for core in each.cores], each.threads, each.node) for each in sets]


def test_cpus_are_split_by_node_and_cores_stay_whole(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grant(monkeypatch, math.inf)
    assert found(set(range(8))) == [([{0, 4}, {1, 5}], 2, 0), ([{2, 6}, {3, 7}], 2, 1)]
    assert found({0, 1, 3, 5}) == [([{0}, {1, 5}], 2, 0), ([{3}], 1, 1)]
    assert found({2, 6}) == [([{2, 6}], 1, 1)]


@pytest.mark.parametrize(
    ("quota", "sets"),
    [
        *((quota, [([{0, 4}, {1, 5}, {2, 6}, {3, 7}], quota, None)]) for quota in (1, 2)),  # one node can use it up
        *(
            (quota, [([{0, 4}, {1, 5}], first, 0), ([{2, 6}, {3, 7}], 2, 1)])
            for quota, first in ((3, 1), (4, 2), (100, 2))
        ),
    ],
)
def test_a_quota_is_shared_by_nodes(nodes: Path, monkeypatch: pytest.MonkeyPatch, quota: int, sets: object) -> None:
    grant(monkeypatch, quota)
    assert found(set(range(8))) == sets


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "parts"),
    [
        (4, 4, 2, [({0, 1}, 2), ({2, 3}, 2)]),
        (5, 5, 2, [({0, 1}, 2), ({2, 3, 4}, 3)]),
        (8, 3, 2, [({0, 1, 2, 3}, 1), ({4, 5, 6, 7}, 2)]),
        (2, 2, 3, [({0}, 1), ({0}, 1), ({1}, 1)]),
    ],
)
def test_a_set_is_shared_out_evenly(cores: int, threads: int, workers: int, parts: list[tuple[set[int], int]]) -> None:
    shared = CpuSet(tuple(frozenset({core}) for core in range(cores)), threads, 0).shared_out(workers)
    assert [(set(each.cpus), each.threads) for each in shared] == parts


def test_the_workers_of_a_gpu_are_as_many_as_said_or_as_the_class_has() -> None:
    gpu = HardwareClass(device="gpu", workers_per_device=4)
    assert discovery.choose_sharing("mine", gpu, None) == 4
    assert discovery.choose_sharing("mine", gpu, 2) == 2
    assert discovery.choose_sharing("mine", HardwareClass(device="gpu"), None) == 1
    assert discovery.choose_sharing("mine", HardwareClass(workers_per_device=4), None) == 1
    with pytest.raises(
        SettingsError, match="--gpu-workers 2: class mine runs on a Neuron core: leave --gpu-workers out"
    ):
        discovery.choose_sharing("mine", HardwareClass(device="neuron"), 2)


GPU = Accelerator("gpu", 1, "GPU-1234", "NVIDIA H200")
CORE = Accelerator("neuron", 3, "3", "inf2.xlarge")


def pinned(accelerator: Accelerator | None = None) -> Pinned:
    return Pinned(frozenset({0, 1, 5}), 2, accelerator)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel shows of drivers; NVIDIA's own can't be asked."""
    monkeypatch.setattr(provenance, "_MODULES", tmp_path / "module")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return tmp_path / "module"


def driver_in(modules: Path, name: str, version: str) -> None:
    (modules / name).mkdir(parents=True)
    (modules / name / "version").write_text(f"{version}\n")


def test_a_gpus_driver_is_asked_for_its_version(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(tmp_path / "driver", driver="580.159.04")
    monkeypatch.syspath_prepend(str(tmp_path / "driver"))
    monkeypatch.delitem(sys.modules, "pynvml")
    found = provenance.describe(pinned(GPU))
    assert found["device"] == "gpu 1 NVIDIA H200 (GPU-1234)"
    assert found["driver"] == "nvidia 580.159.04"
    assert found["host"] == cpu_name()


@pytest.mark.parametrize("is_there", [False, True])
def test_else_the_kernel_is(is_there: bool, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_there:
        play_gpus(tmp_path / "driver", init="Unknown Error")
        monkeypatch.syspath_prepend(str(tmp_path / "driver"))
        monkeypatch.delitem(sys.modules, "pynvml")
    assert provenance.describe(pinned(GPU))["driver"] == "unknown"
    driver_in(modules, "nvidia", "580.159.04")
    assert provenance.describe(pinned(GPU))["driver"] == "nvidia 580.159.04"
    driver_in(modules, "amdgpu", "6.14")
    assert provenance.describe(pinned(replace(GPU, rocm=True)))["driver"] == "amdgpu 6.14"
    assert provenance.describe(pinned(CORE))["driver"] == "unknown"
    driver_in(modules, "neuron", "2.21")
    assert provenance.describe(pinned(CORE))["driver"] == "neuron 2.21"

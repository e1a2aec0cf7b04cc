"""Find the devices of this machine: sets of CPUs, GPUs, Neuron cores. Imports nothing that opens a device."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embedctl_config.errors import SettingsError, WorkerError
from embedctl_config.hardware import Device, HardwareClass
from embedctl_workers.machine import nvidia
from embedctl_workers.machine.cgroup import cpu_quota
from embedctl_workers.machine.devices import (
    HIP_VARIABLES,
    ROCM_VARIABLE,
    VISIBLE_VARIABLES,
    Accelerator,
    cores_of,
    parse_cpus,
    usable_cpus,
)

log = logging.getLogger(__name__)

#: The names of the kinds of devices in messages.
DEVICE_NAMES: Mapping[Device, str] = {"cpu": "CPU", "gpu": "GPU", "neuron": "Neuron core"}
#: The options of `embedctl worker` that choose a device.
DEVICE_OPTIONS: Mapping[Device, str] = {"gpu": "--gpu", "neuron": "--neuron-core"}
_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NEURON_LS = ["neuron-ls", "--json-output"]
_AMD_SMI = ["amd-smi", "list", "-e", "--json"]
#: The vendors' packages put their tools into these folders, which are not always on PATH.
_NEURON_TOOLS, _ROCM_TOOLS = "/opt/aws/neuron/bin", "/opt/rocm/bin"
#: Time limit of a vendor's tool (seconds): on a GPU's first use, it waits for the driver.
_TOOL_S = 60


@dataclass(frozen=True, slots=True)
class CpuSet:
    """CPUs that are near each other: physical cores, each with its hyper-threads.

    `threads` compute, within the cgroup's quota, at most one per core. `node` is their NUMA node; None if it is
    unknown, or if they are on several.
    """

    cores: tuple[frozenset[int], ...]
    threads: int
    node: int | None = None

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset().union(*self.cores)

    def shared_out(self, workers: int) -> list[CpuSet]:
        """Split the cores as equally as possible, one set per worker; workers share a core if there are too few."""
        cores, parts = len(self.cores), []
        for at in range(workers):
            first, end = at * cores // workers, (at + 1) * cores // workers
            threads = (at + 1) * self.threads // workers - at * self.threads // workers
            part = self.cores[first : max(end, first + 1)]
            parts.append(CpuSet(part, max(1, min(threads, len(part))), self.node))
        return parts


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices that were found here, and in `problems` why a tool or driver, although it should, listed none."""

    cpu_sets: Sequence[CpuSet]
    gpus: Sequence[Accelerator] = ()
    neuron_cores: Sequence[Accelerator] = ()
    problems: Mapping[str, str] = field(default_factory=dict)

    def accelerators(self, kind: Device) -> Sequence[Accelerator]:
        """The accelerators of a kind; none for CPUs."""
        return {"gpu": self.gpus, "neuron": self.neuron_cores}.get(kind, ())


def discover(cpus: str | None = None) -> Machine:
    """Find all devices that this process may use, on no other CPUs than `cpus`, such as `0-3`.

    A SettingsError as :func:`usable_cpus`, or if a variable that hides devices can't be parsed.
    """
    problems: dict[str, str] = {}

    def found(kind: str, find: Callable[[], list[Accelerator]]) -> list[Accelerator]:
        try:
            return find()
        except WorkerError as error:
            problems[kind] = str(error)
            return []

    return Machine(
        cpu_sets=find_cpu_sets(usable_cpus(cpus)),
        gpus=found("gpu", find_gpus),
        neuron_cores=found("neuron", find_neuron_cores),
        problems=problems,
    )


def find_cpu_sets(cpus: frozenset[int]) -> list[CpuSet]:
    """Split CPUs into one set per NUMA node, or into a single set if one node can hold the cgroup's whole quota.

    A quota limits threads, not CPUs. Without the single set, several containers with equal quotas would pin their
    processes to the same CPUs.
    """
    by_node = {node: cores_of(cpus & of_node) for node, of_node in _nodes().items() if cpus & of_node}
    if elsewhere := cpus - frozenset().union(*(core for cores in by_node.values() for core in cores)):
        by_node[None] = cores_of(elsewhere)
    total = sum(map(len, by_node.values()))
    granted = int(min(total, cpu_quota()))
    if len(by_node) > 1 and granted < total and granted <= max(map(len, by_node.values())):
        by_node = {None: cores_of(cpus)}
    sets, before = [], 0
    for node, cores in by_node.items():
        after = before + len(cores)
        threads = max(1, after * granted // total - before * granted // total)
        sets.append(CpuSet(tuple(cores), threads, node))
        before = after
    return sets


def find_gpus() -> list[Accelerator]:
    """The GPUs that NVIDIA's driver and AMD's tools tell and no variable hides; a WorkerError if one of them fails."""
    return [*find_nvidia_gpus(), *find_amd_gpus()]


def find_nvidia_gpus() -> list[Accelerator]:
    """The GPUs that NVIDIA's driver tells and CUDA_VISIBLE_DEVICES does not hide.

    A GPU that is divided into parts (MIG) is left out, and each of its parts is a GPU by itself, with the number of the
    whole: CUDA shows a process one part, and a process that is given the whole the first one. A part's memory is in its
    name, such as `MIG 1g.10gb`. A WorkerError if the kernel has GPUs of NVIDIA's, and the driver can't be asked, or
    fails.
    """
    gpus: list[Accelerator] = []
    parts: dict[str, list[Accelerator]] = {}
    for each in nvidia.all_gpus():
        gpu = Accelerator("gpu", each.index, each.uuid, each.name, _node_of(each.bus), memory=each.memory)
        gpus.append(gpu)
        parts[gpu.uid] = [replace(gpu, uid=uuid, name=name, memory=0) for uuid, name in each.parts]
    visible = os.environ.get(VISIBLE_VARIABLES["gpu"])
    shown = gpus if visible is None else _visible_gpus(gpus, visible)
    by_name = {part.uid: part for of_gpu in parts.values() for part in of_gpu}
    return [part for gpu in shown for part in parts.get(gpu.uid) or [by_name.get(gpu.uid, gpu)]]


def find_amd_gpus() -> list[Accelerator]:
    """The GPUs that `amd-smi` shows and no variable hides; none without the tool.

    A WorkerError if the tool fails, or its answer can't be read.
    """
    answer = _output_of(_AMD_SMI, shutil.which(_AMD_SMI[0]) or shutil.which(_AMD_SMI[0], path=_ROCM_TOOLS))
    if answer is None:
        return []
    try:
        gpus = _amd_gpus(json.loads(answer))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkerError(f"{' '.join(_AMD_SMI)} printed output that can't be parsed: {error!r}") from error
    for variable in (ROCM_VARIABLE, next((name for name in HIP_VARIABLES if name in os.environ), "")):
        if (visible := os.environ.get(variable)) is not None:
            gpus = _visible_amd_gpus(gpus, variable, visible)
    return gpus


def find_neuron_cores() -> list[Accelerator]:
    """The Neuron cores that `neuron-ls` shows and NEURON_RT_VISIBLE_CORES does not hide; none without the tool.

    A WorkerError if the tool fails, or its answer can't be read; a SettingsError if the variable can't be parsed.
    """
    answer = _output_of(_NEURON_LS, shutil.which(_NEURON_LS[0]) or shutil.which(_NEURON_LS[0], path=_NEURON_TOOLS))
    cores = [] if answer is None else _neuron_cores(answer)
    variable = VISIBLE_VARIABLES["neuron"]
    if visible := os.environ.get(variable):
        chosen = parse_cpus(visible, variable)
        cores = [core for core in cores if core.index in chosen]
    return cores


def choose_accelerator(
    hardware: str, device: Device, *, gpu: str | None = None, neuron_core: int | None = None
) -> Accelerator | None:
    """The one accelerator that a worker of a class is pinned to; None for a CPU class.

    `gpu` is a GPU's number or UUID, `neuron_core` a core's number; None for the only one.

    Raises:
        SettingsError: an option is for another kind of device than the class; or this machine has no device of the
            class's kind, or not the chosen one, or several and none was chosen.
        WorkerError: a vendor's tool fails, or its answer can't be read.
    """
    asked: dict[Device, str | None] = {"gpu": gpu, "neuron": None if neuron_core is None else str(neuron_core)}
    for kind, option in DEVICE_OPTIONS.items():
        if asked[kind] is not None and kind != device:
            raise SettingsError(
                f"{option} {asked[kind]}: class {hardware} runs on a {DEVICE_NAMES[device]}: leave {option} out, or "
                f'choose a class with device = "{kind}"'
            )
    if device == "cpu":
        return None
    found = find_gpus() if device == "gpu" else find_neuron_cores()
    return _chosen(found, asked[device], hardware, device)


def choose_sharing(hardware: str, entry: HardwareClass, workers: int | None) -> int:
    """How many workers share the GPU of a worker of a class; 1 for a class on other devices.

    `workers` is what `--gpu-workers` says (a SettingsError on other devices); None for the class's own number.
    """
    if entry.device == "gpu":
        return workers or entry.workers_per_device or 1
    if workers is not None:
        raise SettingsError(
            f"--gpu-workers {workers}: class {hardware} runs on a {DEVICE_NAMES[entry.device]}: leave --gpu-workers "
            'out, or choose a class with device = "gpu"'
        )
    return 1


def nothing_found(hardware: str, device: Device, problem: str = "") -> SettingsError:
    """The error for a class whose kind of device this machine lacks or hides."""
    tool = {"gpu": "the driver", "neuron": _NEURON_LS[0]}.get(device, "")
    hidden = VISIBLE_VARIABLES[device] in os.environ
    why = problem or f"{tool} shows none" + (f" that {VISIBLE_VARIABLES[device]} leaves visible" if hidden else "")
    return SettingsError(f"class {hardware} needs a {DEVICE_NAMES[device]}, and none is found here: {why}")


def _chosen(found: Sequence[Accelerator], asked: str | None, hardware: str, device: Device) -> Accelerator:
    name, option = DEVICE_NAMES[device], DEVICE_OPTIONS[device]
    if not found:
        raise nothing_found(hardware, device)
    shown = ", ".join(each.uid if each.uid == str(each.index) else f"{each.index} ({each.uid})" for each in found)
    if asked is None:
        if len(found) > 1:
            raise SettingsError(
                f"class {hardware} runs on one {name}, and there are {len(found)}: choose one with {option}, or start "
                f"`embedctl up`, which runs a worker on each. Here: {shown}"
            )
        return found[0]
    fitting = [each for each in found if asked in (each.uid, str(each.index))]
    fitting = fitting or [each for each in found if not asked.isdecimal() and each.uid.startswith(asked)]
    if len(fitting) != 1:
        wrong = "several match" if fitting else f"there is no such {name}"
        raise SettingsError(f"{option} {asked}: {wrong}. Here: {shown}")
    return fitting[0]


def _nodes() -> dict[int | None, frozenset[int]]:
    """The CPUs of each NUMA node; empty if the kernel shows none."""
    nodes: dict[int | None, frozenset[int]] = {}
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda each: int(each.name[4:])):
        listed = (folder / "cpulist").read_text(encoding="ascii").strip()
        if listed:  # some nodes have memory only
            nodes[int(folder.name[4:])] = frozenset(parse_cpus(listed, str(folder)))
    return nodes


def _output_of(command: list[str], tool: str | None) -> str | None:
    """The output of a vendor's tool; None if it is not installed. A WorkerError if it fails, or takes too long."""
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TOOL_S, check=True
        )
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).strip().splitlines() or ["nothing"]
        raise WorkerError(f"{command[0]} fails with status {error.returncode} and says: {said[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"{command[0]} gives no answer in {_TOOL_S} s") from error
    except (OSError, UnicodeDecodeError) as error:
        raise WorkerError(f"{command[0]} can't be run: {error}") from error
    return done.stdout


def _node_of(bus: str) -> int | None:
    """The NUMA node of a PCI address, such as `00000000:3B:00.0`."""
    domain, _, rest = bus.partition(":")
    try:
        address = f"{int(domain, 16):04x}:{rest.lower()}"
        return _known_node((_PCI_DEVICES / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _known_node(text: str) -> int | None:
    node = int(text)
    return node if node >= 0 else None  # -1: the machine has no nodes, or does not say


def _visible_gpus(gpus: Sequence[Accelerator], visible: str) -> list[Accelerator]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it: in its order, up to the first that does not exist."""
    found: list[Accelerator] = []
    for name in visible.split(",") if visible.strip() else []:
        wanted = name.strip()
        if wanted.startswith("MIG-"):  # a part of a GPU
            found.append(Accelerator("gpu", len(found), wanted))
            continue
        fitting = [gpu for gpu in gpus if str(gpu.index) == wanted]
        fitting = fitting or [gpu for gpu in gpus if wanted.startswith("GPU-") and gpu.uid.startswith(wanted)]
        if len(fitting) != 1:
            if wanted not in ("-1", "NoDevFiles"):
                log.warning("CUDA_VISIBLE_DEVICES=%s: there is no GPU %s; CUDA ignores what follows", visible, wanted)
            break
        found += fitting
    return found


def _amd_gpus(answer: list[dict[str, Any]]) -> list[Accelerator]:
    """The GPUs in HIP's order, which is not the tool's."""
    shown = [each for each in answer if "gpu" in each]
    return [
        _amd_gpu(int(each["gpu"]), str(each["hip_uuid"]), str(each["bdf"]))
        for each in sorted(shown, key=lambda each: int(each["hip_id"]))
    ]


def _amd_gpu(index: int, uid: str, bus: str) -> Accelerator:
    if not uid.startswith("GPU-"):
        raise ValueError(f"a UUID {uid!r}")
    return Accelerator("gpu", index, uid, "AMD GPU", _node_of(bus), rocm=True)


def _visible_amd_gpus(gpus: Sequence[Accelerator], variable: str, visible: str) -> list[Accelerator]:
    """The GPUs that a variable names, by UUID or by position among the GPUs that are still visible."""
    found: list[Accelerator] = []
    for name in visible.split(",") if visible.strip() else []:
        wanted = name.strip()
        fitting = [gpu for place, gpu in enumerate(gpus) if wanted in (str(place), gpu.uid)]
        if not fitting:
            log.warning("%s=%s: there is no GPU %s", variable, visible, wanted)
            break
        found += fitting
    return found


def _neuron_cores(answer: str) -> list[Accelerator]:
    """The cores of every device in the answer of `neuron-ls`, with the numbers of Neuron's runtime."""
    try:
        devices: list[dict[str, Any]] = sorted(json.loads(answer), key=lambda device: int(device["neuron_device"]))
        cores: list[Accelerator] = []
        for device in devices:
            count = int(device["nc_count"])
            ids = device.get("neuroncore_ids") or range(len(cores), len(cores) + count)
            node = device.get("numa_node")
            name = str(device.get("instance_type", ""))
            near = None if node is None else _known_node(str(node))
            cores += [Accelerator("neuron", int(core), str(int(core)), name, near) for core in ids]
    except (ValueError, TypeError, KeyError) as error:
        raise WorkerError(f"{' '.join(_NEURON_LS)} printed output that can't be parsed: {error!r}") from error
    return cores

"""The probe of engines by CPU time, which other work on the machine hardly changes: ours, and other systems'."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from benchmarks.ours.service import Figures

from embedctl_bench.engines import count_of
from embedctl_bench.measuring.machine import cpu_seconds
from embedctl_bench.measuring.sampling import least
from embedctl_bench.peers.models import measured_model, peers_folder
from embedctl_bench.peers.registry import FLOORS, PEERS, System, engine_of
from embedctl_bench.peers.tuned import Task, TunedProcess
from embedctl_bench.texts.workloads import make_workload
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import usable_cpus
from embedctl_workers.models.cache import private_folder


def engines_by_cpu(
    *,
    model: str = "all-MiniLM-L6-v2",
    classes: str = "cpu",
    peers: str = "ctranslate2,st-openvino",
    workload: str = "W1",
    rounds: int = 7,
    tries: int = 0,
    floor: bool = True,
    quick: bool = False,
) -> Figures:
    """CPU seconds of engines for the same texts, on one thread each, by turns, the least of so many rounds.

    Each setting of one process is a contender of its own, and so is each product of the floor; a system's figure is
    that of its fastest setting, of the first `tries` (0: of all). Ratios are of the first class to each other system.
    """
    settings, cpu = Settings(), min(usable_cpus(None))
    place = private_folder(peers_folder(settings))
    measured = measured_model(model, settings, place)
    load = make_workload(workload, count_of(workload, measured, quick=quick), measured, place)
    task = Task(measured, load, [cpu], place)
    ours = [engine_of(name, settings) for name in classes.split(",")]
    floors = [each for each in FLOORS if floor and each.precision in {own.precision for own in ours}]
    with ExitStack() as stack:
        running = []
        for system in (*ours, *(PEERS[name] for name in peers.split(",") if name), *floors):
            for alone in _alone(system)[: tries or None]:
                process = TunedProcess(alone, task)
                stack.callback(process.close)
                running.append((system.name, partial(_encode, process)))
        seconds = least(running, rounds)
    own = seconds[ours[0].name]
    found = {f"{name}: CPU s for 1,000 texts": 1000 * each / len(load.lengths) for name, each in seconds.items()}
    return found | {f"{ours[0].name} x {name}": each / own for name, each in seconds.items() if name != ours[0].name}


def _alone(system: System) -> list[System]:
    """The system with each of its settings of one process."""
    settings = [each for each in system.settings if each.processes == 1 and each.load.get("workers", 1) == 1]
    return [replace(system, settings=(each,)) for each in settings]


def _encode(process: TunedProcess) -> float:
    """Encode the texts once: the CPU seconds of all of the system's processes."""
    before = cpu_seconds(process.pid)
    process.encode()
    return cpu_seconds(process.pid) - before

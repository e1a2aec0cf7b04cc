"""A short measured search for the number of workers on a GPU."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from embedctl_config.errors import ModelError
from embedctl_config.settings import Settings
from embedctl_workers.commands.measuring_processes import measuring
from embedctl_workers.commands.options import plural
from embedctl_workers.machine import devices
from embedctl_workers.machine.devices import Accelerator, cores_of, format_cpus, thread_count
from embedctl_workers.machine.discovery import CpuSet, discover
from embedctl_workers.models.tuning import Tuned
from embedctl_workers.supervising.plan import PlannedWorker, make_plan

#: More workers take longer to load than they are likely to gain.
_NUMBERS = (1, 2, 4, 8)
#: Time per measurement (seconds), and how many there are for each number; a shorter one before them warms up.
_SECONDS, _ROUNDS, _WARM_UP_S = 2.0, 3, 1.0
#: More workers must be faster by this factor: each holds a context and the weights, and less is left for batches.
_WORTH = 1.05


@dataclass(frozen=True, slots=True)
class Sharing:
    """A number of workers on a GPU, each with a part of the CPUs, and their rate: tokens/s of all together."""

    workers: tuple[PlannedWorker, ...]
    rate: float
    engine: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{plural(len(self.workers), 'worker')} ({self.engine}): {self.rate:,.0f} tokens/s"


def search(
    settings: Settings,
    hardware: str,
    model: str,
    accelerator: Accelerator,
    cpus: str | None,
    on_found: Callable[[str], None],
) -> Sharing:
    """The smallest number of workers that no other number beats clearly; `on_found` gets a line about each number.

    They divide `cpus`; None for those that `embedctl up` gives the workers of this GPU. A ModelError if not even one
    worker can be measured, a SettingsError if `cpus` is not a list of available CPUs.
    """
    best: Sharing | None = None
    for workers in _ways(hardware, model, accelerator, _cpus(settings, hardware, accelerator, cpus)):
        try:
            found = _measure(workers)
        except ModelError:
            if best is None:
                raise
            on_found(f"{plural(len(workers), 'worker')}: not measured, see the message above")
            break
        on_found(str(found))
        if best is not None and found.rate < best.rate * _WORTH:
            break  # even more workers would gain nothing either
        best = found
    assert best is not None
    return best


def as_tuned(found: Sharing) -> Tuned:
    return Tuned(
        budgets={},
        workers=len(found.workers),
        threads=found.workers[0].cpus.threads,
        cpus=len(frozenset().union(*(worker.cpus.cpus for worker in found.workers))),
        tokens_per_s=round(found.rate, 1),
    )


def _cpus(settings: Settings, hardware: str, accelerator: Accelerator, cpus: str | None) -> CpuSet:
    if cpus is None:
        plan = make_plan(settings, discover(), classes=[hardware])
        here = [each for each in plan.workers if each.accelerator and each.accelerator.uid == accelerator.uid]
        chosen = frozenset().union(*(each.cpus.cpus for each in here))
        return CpuSet(tuple(cores_of(chosen)), sum(each.cpus.threads for each in here))
    chosen = devices.usable_cpus(cpus)
    return CpuSet(tuple(cores_of(chosen)), thread_count(chosen))


def _ways(hardware: str, model: str, accelerator: Accelerator, cpus: CpuSet) -> Iterator[tuple[PlannedWorker, ...]]:
    """The workers of each number, as long as each has a core."""
    for number in _NUMBERS:
        if number <= len(cpus.cores):
            yield tuple(
                PlannedWorker(hardware, part, (model,), accelerator, sharing=number) for part in cpus.shared_out(number)
            )


def _measure(workers: tuple[PlannedWorker, ...]) -> Sharing:
    with measuring(workers[0].models[0], [_command(worker) for worker in workers]) as (facts, ask):
        ask(_WARM_UP_S)
        rate = statistics.median(ask(_SECONDS) for _ in range(_ROUNDS))
    return Sharing(workers, rate, facts["engine"], facts["fingerprint"])


def _command(worker: PlannedWorker) -> list[str]:
    assert worker.accelerator is not None
    return [
        *(sys.executable, "-m", "embedctl_workers.measuring.tune_process"),
        *(worker.hardware, worker.models[0], format_cpus(worker.cpus.cpus), str(worker.cpus.threads)),
        *(worker.accelerator.uid, str(worker.sharing)),
    ]

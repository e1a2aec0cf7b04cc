"""A short measured search for the number of workers that share some CPUs, and perhaps a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import Any

from embedctl.common.processes import running
from embedctl_config.errors import ModelError
from embedctl_config.settings import Settings
from embedctl_workers.commands.options import plural
from embedctl_workers.machine import devices
from embedctl_workers.machine.devices import Accelerator, cores_of, format_cpus, thread_count
from embedctl_workers.machine.discovery import CpuSet, discover
from embedctl_workers.models.fastest import Choice, fastest
from embedctl_workers.models.tuning import Tuned
from embedctl_workers.supervising.plan import PlannedWorker, make_plan

#: On a GPU, more workers take longer to load than they are likely to gain.
_MOST_ON_A_GPU = 8
#: Time per measurement (seconds).
_SECONDS = 1.0


@contextmanager
def measuring(
    model: str, commands: Sequence[Sequence[str]]
) -> Iterator[tuple[dict[str, Any], Callable[[float], float]]]:
    """A context with a process for each command. Call it in the main thread.

    Each prints a JSON object of facts when it has loaded the model, and then answers each line with a rate. If this
    process is killed, the kernel ends them. The context gives the facts of the first, and a function that sends a line
    to all of them: the sum of their answers. A ModelError says that one ended, as when it can't load the model; it has
    printed the reason.
    """
    with ExitStack() as stack:
        children = [
            stack.enter_context(running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
            for command in commands
        ]

        def answers() -> list[Any]:
            lines = [child.stdout.readline() for child in children if child.stdout]
            if not all(line.endswith(b"\n") for line in lines):  # one ended, perhaps within a line
                raise ModelError(
                    f"model {model!r} can't be measured: the measuring process ended; see its messages above"
                )
            return [json.loads(line) for line in lines]

        def ask(question: float) -> float:
            for child in children:
                if child.stdin:
                    with suppress(BrokenPipeError):  # it has ended, so it has no answer either
                        child.stdin.write(f"{question}\n".encode())
            return float(sum(answers()))

        yield answers()[0], ask


@dataclass(frozen=True, slots=True)
class Sharing:
    """A number of workers, each with a part of the CPUs, and their rate: tokens/s of all together."""

    workers: tuple[PlannedWorker, ...]
    rate: float
    engine: str
    fingerprint: str

    @property
    def cpus(self) -> int:
        """How many CPUs they share."""
        return len(frozenset().union(*(worker.cpus.cpus for worker in self.workers)))

    @property
    def tuned(self) -> Tuned:
        return Tuned(len(self.workers), self.workers[0].cpus.threads, self.cpus, round(self.rate, 1))

    def __str__(self) -> str:
        threads = plural(self.workers[0].cpus.threads, "thread")
        return f"{plural(len(self.workers), 'worker')} × {threads} ({self.engine}): {self.rate:,.0f} tokens/s"


def search(
    settings: Settings,
    hardware: str,
    model: str,
    accelerator: Accelerator | None,
    cpus: str | None,
    on_found: Callable[[str], None],
) -> Sharing:
    """The smallest number of workers that no other number beats clearly; `on_found` gets a line about each number.

    They divide `cpus`; None for all of them, or with a GPU for those that `embedctl up` gives its workers. A ModelError
    if not even one worker can be measured, a SettingsError if `cpus` is not a list of available CPUs.

    On CPUs, each number takes turns with the best so far. On a GPU, the memory is not large enough for both.
    """
    best: Sharing | None = None
    for workers in _ways(hardware, model, accelerator, _cpus(settings, hardware, accelerator, cpus)):
        try:
            *again, found = _measure([*([best.workers] if best and not accelerator else []), workers])
        except ModelError:
            if best is None:
                raise
            on_found(f"{plural(len(workers), 'worker')}: not measured, see the message above")
            break
        on_found(str(found))
        best = again[0] if again else best
        # Each worker holds the weights, so more must be clearly faster.
        if best and Choice.among({"best": 1 / best.rate, "more": 1 / found.rate}).name == "best":
            break  # even more workers would gain nothing either
        best = found
    assert best is not None
    return best


def _cpus(settings: Settings, hardware: str, accelerator: Accelerator | None, cpus: str | None) -> CpuSet:
    if accelerator is not None and cpus is None:
        plan = make_plan(settings, discover(), classes=[hardware])
        here = [each for each in plan.workers if each.accelerator and each.accelerator.uid == accelerator.uid]
        chosen = frozenset().union(*(each.cpus.cpus for each in here))
        return CpuSet(tuple(cores_of(chosen)), sum(each.cpus.threads for each in here))
    chosen = devices.usable_cpus(cpus)
    return CpuSet(tuple(cores_of(chosen)), thread_count(chosen))


def _ways(
    hardware: str, model: str, accelerator: Accelerator | None, cpus: CpuSet
) -> Iterator[tuple[PlannedWorker, ...]]:
    """The workers of each number, as long as each has a core and computes with a thread of its own."""
    most = min(len(cpus.cores), cpus.threads) if accelerator is None else min(len(cpus.cores), _MOST_ON_A_GPU)
    for number in takewhile(lambda number: number <= most, (1 << power for power in count())):
        sharing = 1 if accelerator is None else number
        yield tuple(
            PlannedWorker(hardware, part, (model,), accelerator, sharing=sharing) for part in cpus.shared_out(number)
        )


def _measure(ways: Sequence[tuple[PlannedWorker, ...]]) -> list[Sharing]:
    """These numbers of workers, by turns."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(measuring(way[0].models[0], [_command(worker) for worker in way])) for way in ways
        ]
        runs = {str(len(way)): [partial(_seconds_per_token, ask)] for way, (_, ask) in zip(ways, running, strict=True)}
        seconds = fastest(runs).seconds
    return [
        Sharing(way, 1 / seconds[str(len(way))], facts["engine"], facts["fingerprint"])
        for way, (facts, _) in zip(ways, running, strict=True)
    ]


def _seconds_per_token(ask: Callable[[float], float]) -> float:
    return 1 / ask(_SECONDS)


def _command(worker: PlannedWorker) -> list[str]:
    return [
        *(sys.executable, "-m", "embedctl_workers.measuring.tune_process"),
        *(worker.hardware, worker.models[0], format_cpus(worker.cpus.cpus), str(worker.cpus.threads)),
        *((worker.accelerator.uid, str(worker.sharing)) if worker.accelerator else ()),
    ]

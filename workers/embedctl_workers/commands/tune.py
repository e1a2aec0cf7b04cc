"""`embedctl model tune`: a short measured search for workers, and for threads and the token budget on some CPUs."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import click

from embedctl_config.errors import SettingsError
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.commands.options import (
    class_option,
    cpus_option,
    gpu_option,
    json_option,
    plural,
    settings_and_class,
)
from embedctl_workers.machine import devices
from embedctl_workers.machine.discovery import choose_accelerator
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.tuning import DEFAULT_TOKEN_BUDGET, Tuned, load_tuned, save_tuned

_BUDGETS = (256, 512, 1024, 2048, 4096)
_ROUNDS = 3
#: A larger budget, or more workers, must be better by this factor: both cost memory.
_WORTH = 1.02


@dataclass(frozen=True, slots=True)
class Split:
    """A way to share a set of CPUs between workers, and how fast it is.

    Each worker has one of `cpus` and so many compute threads; `rates` are tokens/s of all of them together, by token
    budget.
    """

    cpus: tuple[frozenset[int], ...]
    threads: int
    rates: dict[int, float]

    @property
    def best_budget(self) -> int:
        """The smallest budget that no other budget clearly beats."""
        most = max(self.rates.values())
        return min(budget for budget, rate in self.rates.items() if rate * _WORTH >= most)

    @property
    def best_rate(self) -> float:
        """The rate with that budget, in tokens/s."""
        return self.rates[self.best_budget]


@click.command()
@click.argument("model")
@class_option("cpu")
@cpus_option
@gpu_option
@json_option
def tune(model: str, hardware: str | None, cpus: str | None, gpu: str | None, *, as_json: bool) -> None:
    """Find the fastest workers, threads and token budget for MODEL.

    Measures each way of dividing the CPUs among workers, for about half a minute each. Nothing else should run on these
    CPUs meanwhile. Workers of this class use the budget from their next start, unless the class sets a `token_budget`.

    For a class on GPUs, measures 1, 2, 4 and 8 workers on one GPU, as long as more are faster, tokenising included.
    Nothing else should run on the GPU. By default, they divide the CPUs that `embedctl up` gives to that GPU.

    `embedctl up` starts the number that was fastest, unless the class sets `workers_per_device`.
    """
    settings, name = settings_and_class(hardware, "cpu")
    entry = settings.hardware_class(name)
    if entry.device == "neuron":
        raise SettingsError(f"class {name} runs one worker on each Neuron core: there is nothing to tune")
    accelerator = choose_accelerator(name, entry.device, gpu=gpu)
    say: Callable[[str], None] = (lambda line: None) if as_json else click.echo  # one JSON value is the only output
    overriding = ["workers_per_device"]
    if accelerator is None:
        tuned, fingerprint, start = _tune_cpus(settings, name, model, cpus, say)
        overriding.insert(0, "token_budget")
    else:
        from embedctl_workers.commands import tune_gpu  # it imports embedctl, and NumPy with it

        best = tune_gpu.search(settings, name, model, accelerator, cpus, say)
        tuned, fingerprint = tune_gpu.as_tuned(best), best.fingerprint
        kind = f"on GPUs like this one with {plural(tuned.cpus, 'CPU')}"
        start = [f"best: {plural(tuned.workers, 'worker')}, {kind}. Start:"]
        start += [f"  {worker.command}" for worker in best.workers]
    save_tuned(tuned, entry, fingerprint, cache_folder(settings), accelerator)
    for line in (*start, *_what_overrides(name, entry, overriding)):
        say(line)
    if as_json:
        click.echo(json.dumps(asdict(tuned)))


def _what_overrides(name: str, entry: HardwareClass, settings: Sequence[str]) -> Iterator[str]:
    for setting in settings:
        if value := getattr(entry, setting):
            yield f"[classes.{name}] sets {setting} = {value}, which is used instead of what was found"


def _tune_cpus(
    settings: Settings, name: str, model: str, cpus: str | None, say: Callable[[str], None]
) -> tuple[Tuned, str, list[str]]:
    """What was found, the model's fingerprint, and lines on how to start the workers."""
    found: list[Split] = []
    fingerprint = ""
    for shares in _shares(devices.usable_cpus(cpus)):
        with _measured(name, model, shares) as (facts, ask):
            fingerprint = facts["fingerprint"]
            split = Split(shares, facts["threads"], _search(ask))
        found.append(split)
        say(_line(split, facts["engine"]))
        if split.best_rate * _WORTH < max(each.best_rate for each in found):
            break  # even more workers would be slower
    best = max(found, key=lambda split: split.best_rate / (_WORTH if len(split.cpus) > 1 else 1))
    before = load_tuned(settings.hardware_class(name), fingerprint, cache_folder(settings))
    tuned = Tuned(
        budgets={**(before.budgets if before else {}), **{split.threads: split.best_budget for split in found}},
        workers=len(best.cpus),
        threads=best.threads,
        cpus=sum(map(len, best.cpus)),
        tokens_per_s=round(best.best_rate, 1),
    )
    start = [f"best: {plural(len(best.cpus), 'worker')}, {plural(best.threads, 'thread')} each. Start:"]
    worker = f"  embedctl worker --class {name} --model {model} --cpus "
    start += [worker + devices.format_cpus(share) for share in best.cpus]
    return tuned, fingerprint, start


def _shares(cpus: frozenset[int]) -> Iterator[tuple[frozenset[int], ...]]:
    """Ways to share CPUs between one worker, two, four, … as long as all shares are equal."""
    ordered = sorted(cpus)
    workers = 1
    while len(ordered) % workers == 0 and workers <= len(ordered):
        size = len(ordered) // workers
        yield tuple(frozenset(ordered[at : at + size]) for at in range(0, len(ordered), size))
        workers *= 2


def _search(ask: Callable[[int], float]) -> dict[int, float]:
    """Tokens/s by token budget. Each round measures every budget, so a drift of the machine affects all equally."""
    ask(DEFAULT_TOKEN_BUDGET)  # warms up
    rounds = [{budget: ask(budget) for budget in _BUDGETS} for _ in range(_ROUNDS)]
    return {budget: statistics.median(each[budget] for each in rounds) for budget in _BUDGETS}


def _measured(
    hardware: str, model: str, shares: Sequence[frozenset[int]]
) -> AbstractContextManager[tuple[dict[str, Any], Callable[[int], float]]]:
    """A context with a measuring process on each share of the CPUs; see :func:`measuring`."""
    from embedctl_workers.commands.measuring_processes import measuring  # it imports embedctl, and NumPy with it

    program = (sys.executable, "-m", "embedctl_workers.measuring.tune_process", hardware, model)
    return measuring(model, [[*program, devices.format_cpus(share)] for share in shares])


def _line(split: Split, engine: str) -> str:
    rates = "  ".join(f"{budget}: {rate:,.0f}" for budget, rate in split.rates.items())
    shared = f"{plural(len(split.cpus), 'worker')} × {plural(split.threads, 'thread')}"
    return f"{shared} ({engine}), tokens/s by token budget: {rates}; best {split.best_budget}"

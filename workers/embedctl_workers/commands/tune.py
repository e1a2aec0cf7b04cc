"""`embedctl model tune`: a short measured search for the token budget, and for workers and threads on some CPUs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import click

from embedctl_config.errors import ModelError
from embedctl_config.settings import load_settings
from embedctl_workers.commands.options import class_option, cpus_option, json_option
from embedctl_workers.machine import devices
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.tuning import DEFAULT_TOKEN_BUDGET, Tuned, load_tuned, save_tuned

_BUDGETS = (256, 512, 1024, 2048, 4096)
_ROUNDS = 3
#: A larger budget, or more workers, must be better by this factor: both cost memory.
_WORTH = 1.02


@dataclass(frozen=True, slots=True)
class Split:
    """A way to share a set of CPUs between workers, and how fast it is.

    Attributes:
        cpus: those of each worker.
        threads: how many compute threads each worker has.
        rates: tokens/s of all workers together, by token budget.
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
@json_option
def tune(model: str, hardware: str | None, cpus: str | None, *, as_json: bool) -> None:
    """Find the fastest token budget, workers and threads for MODEL.

    Measures each way of dividing the CPUs among workers, for about half a minute each. Nothing else should run on these
    CPUs meanwhile. Workers of this class use the budget from their next start, unless the class sets a `token_budget`.
    """
    settings = load_settings(hardware=hardware)
    name = "cpu" if settings.hardware == "auto" else settings.hardware
    entry = settings.hardware_class(name)
    found: list[Split] = []
    fingerprint = ""
    for shares in _shares(devices.usable_cpus(cpus)):
        with _measured(name, model, shares) as (facts, ask):
            fingerprint = facts["fingerprint"]
            split = Split(shares, facts["threads"], _search(ask))
        found.append(split)
        if not as_json:
            click.echo(_line(split, facts["engine"]))
        if split.best_rate * _WORTH < max(each.best_rate for each in found):
            break  # even more workers would be slower
    best = max(found, key=lambda split: split.best_rate / (_WORTH if len(split.cpus) > 1 else 1))
    cache = cache_folder(settings)
    before = load_tuned(entry, fingerprint, cache)
    tuned = Tuned(
        budgets={**(before.budgets if before else {}), **{split.threads: split.best_budget for split in found}},
        workers=len(best.cpus),
        threads=best.threads,
        cpus=sum(map(len, best.cpus)),
        tokens_per_s=round(best.best_rate, 1),
    )
    save_tuned(tuned, entry, fingerprint, cache)
    if as_json:
        click.echo(json.dumps(asdict(tuned)))
        return
    click.echo(f"best: {_plural(len(best.cpus), 'worker')}, {_plural(best.threads, 'thread')} each. Start:")
    for share in best.cpus:
        click.echo(f"  embedctl worker --class {name} --model {model} --cpus {devices.format_cpus(share)}")
    if entry.token_budget:
        click.echo(
            f"[classes.{name}] sets token_budget = {entry.token_budget}, which is used instead of what was found"
        )


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


@contextmanager
def _measured(
    hardware: str, model: str, shares: Sequence[frozenset[int]]
) -> Iterator[tuple[dict[str, Any], Callable[[int], float]]]:
    """A context with a measuring process on each share of the CPUs.

    Returns:
        The facts of the first process, and a function that measures a token budget: tokens/s of all processes together.

    Raises:
        ModelError: a process ended, as when it can't load the model; it has printed the reason.
    """
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "embedctl_workers.measuring.budgets"),
                        *(hardware, model, devices.format_cpus(share)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for share in shares
        ]
        for child in children:
            stack.callback(child.terminate)

        def answers() -> list[Any]:
            lines = [child.stdout.readline() for child in children if child.stdout]
            if not all(lines):
                raise ModelError(
                    f"model {model!r} can't be measured: the measuring process ended; see its messages above"
                )
            return [json.loads(line) for line in lines]

        def ask(budget: int) -> float:
            for child in children:
                if child.stdin:
                    child.stdin.write(f"{budget}\n")
                    child.stdin.flush()
            return float(sum(answers()))

        yield answers()[0], ask


def _line(split: Split, engine: str) -> str:
    rates = "  ".join(f"{budget}: {rate:,.0f}" for budget, rate in split.rates.items())
    shared = f"{_plural(len(split.cpus), 'worker')} × {_plural(split.threads, 'thread')}"
    return f"{shared} ({engine}), tokens/s by token budget: {rates}; best {split.best_budget}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")

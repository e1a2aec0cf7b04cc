"""Measurements of the product, each a function that returns figures by name.

    python -m benchmarks.ours.probes NAME [--set records=1000] [--rounds 5] [--other CHECKOUT]

Redis, workers and callers share this machine's CPUs. A probe runs once a round, in a process that stays. With --other,
the code of another checkout takes turns with this one's, in alternating order, and ratios are of the same round.
Figures are medians of the rounds, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ours import jobs, outputs
from benchmarks.ours.databases import databases
from benchmarks.ours.host_side import host_side
from benchmarks.ours.reaper import reaper
from benchmarks.ours.service import Figures, machine_line, serve, sides
from benchmarks.ours.service_scale import service_scale
from benchmarks.ours.shares import shares, shares_under_kills
from benchmarks.ours.since_scale import since_scale

from embedctl_bench.measuring.sampling import turn_of
from embedctl_bench.report import grid


def gpu_batch(*, shape: str = "bge-base-shape", tokens: int = 32_768, length: int = 0, cpu: bool = False) -> Figures:
    """What a GPU makes of a batch of the engine for packed tokens: of W1's lengths, or of texts of one length."""
    from benchmarks.ours.gpu_probe import gpu_batch as measured  # torch is for this probe alone

    return measured(shape, tokens, length, cpu=cpu)


#: By the name on the command line.
PROBES: Mapping[str, Callable[..., Figures]] = {
    probe.__name__: probe
    for probe in (
        jobs.redis_calls,
        jobs.recovery,
        jobs.submit_rate,
        jobs.submit_latency,
        jobs.small_jobs,
        jobs.queue_overhead,
        outputs.formats,
        outputs.drain,
        databases,
        since_scale,
        shares,
        shares_under_kills,
        service_scale,
        reaper,
        host_side,
        gpu_batch,
    )
}


def main() -> None:
    """Run the command line."""
    rows = [f"  {name}({', '.join(_shown(probe))}): {_first_line(probe)}" for name, probe in PROBES.items()]
    parser = argparse.ArgumentParser(
        description="\n".join([__doc__, *rows]), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=PROBES)
    parser.add_argument("--set", dest="options", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(lambda request: PROBES[request["name"]](**request["options"]))
        return
    if not asked.name:
        parser.error(f"name a probe: {', '.join(PROBES)}")
    options = _options(PROBES[asked.name], asked.options, parser)
    found: dict[str, list[Figures]] = {}
    print(machine_line(), flush=True)
    with sides("benchmarks.ours.probes", asked.other) as running:
        for number in range(asked.rounds):
            for side in turn_of(list(running), number):
                found.setdefault(side, []).append(running[side].call(name=asked.name, options=options))
    print(f"{asked.name} {json.dumps(options)}: {_first_line(PROBES[asked.name])}\n\n{table(found)}")


def table(found: Mapping[str, Sequence[Figures]]) -> str:
    """A row for each figure: of each side in words, and the ratio of the two in the same rounds."""
    names = sorted(found, reverse=True)  # this before other
    rows = []
    for figure in found[names[0]][0]:
        values = [[each.get(figure, float("nan")) for each in found[name]] for name in names]
        if len(values) > 1:
            values.append([a / b if b else float("nan") for a, b in zip(*values, strict=True)])
        rows.append(
            [figure, *(f"{statistics.median(each):,.4g} ({min(each):,.4g}–{max(each):,.4g})" for each in values)]
        )
    return grid(["figure", *names, *([" / ".join(names)] if len(names) > 1 else [])], rows)


def _options(probe: Callable[..., Figures], given: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """A probe's options by name; each is of the type of its default."""
    defaults = {name: each.default for name, each in inspect.signature(probe).parameters.items()}
    found = {}
    for each in given:
        name, _, text = each.partition("=")
        if name not in defaults:
            parser.error(f"--set {name}: {probe.__name__} has {', '.join(defaults)}")
        kind = type(defaults[name])
        try:
            found[name] = text in ("1", "true", "yes") if kind is bool else kind(text)
        except ValueError:
            parser.error(f"--set {each}: it is no {kind.__name__}")
    return found


def _shown(probe: Callable[..., Figures]) -> list[str]:
    return [f"{name}={each.default!r}" for name, each in inspect.signature(probe).parameters.items()]


def _first_line(probe: Callable[..., Figures]) -> str:
    return inspect.getdoc(probe).partition("\n")[0]  # type: ignore[union-attr]  # every probe has one


if __name__ == "__main__":
    main()

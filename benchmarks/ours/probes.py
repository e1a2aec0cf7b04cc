"""Measurements of the product, each a function that returns figures by name.

    python -m benchmarks.ours.probes NAME [--set records=1000] [--rounds 5] [--other CHECKOUT]

Without a name, it lists them. Redis, workers and callers share this machine's CPUs. A probe runs once a round, in a
process that stays. With --other, the code of another checkout takes turns with this one's, in alternating order, and
ratios are of the same round. Figures are medians of the rounds, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.ours.service import Figures, machine_line, sides

from embedctl_bench.measuring.sampling import turn_of
from embedctl_bench.peers.adapters.embedctl_adapters.serving import serve
from embedctl_bench.report import grid

#: Module → its probes. Only that of the probe is imported, because others need torch.
PROBES: Mapping[str, Sequence[str]] = {
    "jobs": ("redis_calls", "recovery", "submit_rate", "submit_latency", "small_jobs", "drain"),
    "destinations": ("destinations",),
    "sync_scale": ("sync_scale",),
    "turns": ("cost_of_turns",),
    "shares": ("shares", "shares_under_kills"),
    "service_scale": ("service_scale",),
    "hostile": ("hostile", "hostile_kinds"),
    "gateway_load": ("gateway_connections", "gateway_batches", "gateway_files"),
    "poison": ("poison",),
    "accuracy": ("accuracy",),
    "engine": ("engine_profile", "pipeline_cost", "engines_by_cpu", "choices"),
    "other_outputs": ("other_outputs", "agreement"),
}
_MODULES = {name: module for module, names in PROBES.items() for name in names}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=_MODULES)
    parser.add_argument("--set", dest="options", action="append", default=[], metavar="NAME=VALUE", help="repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(lambda request: probe_of(request["name"])(**request["options"]))
        return
    if not asked.name:
        for name in _MODULES:
            given = [f"{each.name}={each.default!r}" for each in inspect.signature(probe_of(name)).parameters.values()]
            print(f"{name} ({', '.join(given)}): {_first_line(name)}")
        return
    options = _options(asked.name, asked.options, parser)
    found: dict[str, list[Figures]] = {}
    print(machine_line(), flush=True)
    with sides("benchmarks.ours.probes", asked.other) as running:
        for number in range(asked.rounds):
            for side in turn_of(list(running), number):
                figures = running[side].call(name=asked.name, options=options)
                found.setdefault(side, []).append(figures)
                print(f"round {number + 1}, {side}: {json.dumps(figures)}", flush=True)
    print(f"{asked.name} {json.dumps(options)}: {_first_line(asked.name)}\n\n{table(found)}")


def probe_of(name: str) -> Callable[..., Figures]:
    probe: Callable[..., Figures] = getattr(import_module(f"benchmarks.ours.{_MODULES[name]}"), name)
    return probe


def table(found: Mapping[str, Sequence[Figures]]) -> str:
    """A row for each figure: of each side in words, and the ratio of the two in the same rounds."""
    names = sorted(found, reverse=True)  # this before other
    rows = []
    for figure in found[names[0]][0]:
        values = [[each.get(figure, float("nan")) for each in found[name]] for name in names]
        if len(values) > 1:
            values.append([a / b if b else float("nan") for a, b in zip(*values, strict=True)])
        rows.append(
            [figure, *(f"{statistics.median(each):,.6g} ({min(each):,.6g}–{max(each):,.6g})" for each in values)]
        )
    return grid(["figure", *names, *([" / ".join(names)] if len(names) > 1 else [])], rows)


def _options(name: str, given: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """A probe's options by name; each is of the type of its default."""
    defaults = {option: each.default for option, each in inspect.signature(probe_of(name)).parameters.items()}
    found = {}
    for each in given:
        option, _, text = each.partition("=")
        if option not in defaults:
            parser.error(f"--set {option}: {name} has {', '.join(defaults)}")
        kind = type(defaults[option])
        try:
            found[option] = text in ("1", "true", "yes") if kind is bool else kind(text)
        except ValueError:
            parser.error(f"--set {each}: it is no {kind.__name__}")
    return found


def _first_line(name: str) -> str:
    return inspect.getdoc(probe_of(name)).partition("\n")[0]  # type: ignore[union-attr]  # every probe has one


if __name__ == "__main__":
    main()

"""CPU embedding engines side by side: ours, others, and the floor of matrix products alone.

    make bench-peers ARGS="--models minilm --workloads W1 --rounds 5 --output report.md"

Every system has an environment of its own, made when first needed in `build/peers`, and a process that stays loaded.
Each first tries its few sensible settings on a sample and keeps the fastest; then all encode the same texts on the same
CPUs, round by round, in alternating order, so that a drift of the machine touches all. Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.ours.peers_models import MODELS, PLACE, model_of
from benchmarks.ours.peers_report import Comparison, Result, render
from benchmarks.ours.workloads import describe, make_workload

from embedctl_bench.peers.child import Child, reference_of
from embedctl_bench.peers.environments import Unavailable
from embedctl_bench.peers.registry import FLOOR, SYSTEMS
from embedctl_workers.machine.devices import parse_cpus

#: Texts of each workload for MiniLM; with --quick. A larger model gets as many fewer as makes the work the same.
COUNTS = {"W1": (2048, 256), "W2": (192, 24)}
QUICK_ROUNDS = 2


def main() -> None:
    """Run the command line."""
    arguments = _arguments()
    cpus = sorted(parse_cpus(arguments.cpus) if arguments.cpus else os.sched_getaffinity(0))
    comparisons: list[Comparison] = []
    try:
        smallest = model_of("minilm", PLACE).flops_per_token
        for model in (model_of(name, PLACE) for name in arguments.models):
            for workload_name in arguments.workloads:
                count = round(COUNTS[workload_name][arguments.quick] * smallest / model.flops_per_token)
                workload = make_workload(workload_name, count, model.folder / "tokenizer.json", PLACE)
                results = [Result(SYSTEMS[name]) for name in arguments.systems]
                comparisons.append(Comparison(model, workload, results))
                _compare(comparisons[-1], cpus, QUICK_ROUNDS if arguments.quick else arguments.rounds)
                _write(arguments.output, render(comparisons, cpus))
    except KeyboardInterrupt:
        _say("stopped: this is what was measured")
    except Unavailable as error:
        sys.exit(f"no reference to compare with: {error}")
    report = render(comparisons, cpus)
    _write(arguments.output, report)
    print(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def some_of(known: Sequence[str]) -> dict:
        def parse(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; known: {', '.join(known)}")
            return text.split(",")

        return {"type": parse, "default": list(known), "metavar": "A,B", "help": ",".join(known)}

    parser.add_argument("--models", **some_of(list(MODELS)))
    parser.add_argument("--workloads", **some_of(list(COUNTS)))
    parser.add_argument("--systems", **some_of(list(SYSTEMS)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpus", help="such as 0-1 (default: all)")
    parser.add_argument("--output", type=Path, help="a Markdown file, written after each table")
    parser.add_argument("--quick", action="store_true", help=f"an eighth of the texts, {QUICK_ROUNDS} rounds")
    return parser.parse_args()


def _compare(comparison: Comparison, cpus: Sequence[int], rounds: int) -> None:
    """Load every system, then measure them round by round."""
    model, workload = comparison.model, comparison.workload
    _say(f"{model.name}, {describe(workload)}")
    reference = reference_of(model, workload, cpus, PLACE)
    running: dict[str, tuple[Child, Result]] = {}
    try:
        for result in comparison.results:
            name = result.system.name
            try:
                child = Child(result.system, model, workload, cpus, PLACE)
            except Unavailable as error:
                result.unavailable = str(error)
                _say(f"{name}: not available: {error}")
                continue
            running[name] = child, result
            result.setting, result.tried, result.versions = child.setting, child.tried, child.versions
            _say(f"{name}: {child.setting}")
        for number in range(rounds + 1):
            order = list(running)
            for name in order if number % 2 else reversed(order):
                if not _measure(*running[name], reference, counts=number > 0):
                    del running[name]
    finally:
        for child, _ in running.values():
            child.close()


def _measure(child: Child, result: Result, reference: np.ndarray, *, counts: bool) -> bool:
    """Run a system once over the workload; whether it came through."""
    try:
        done = child.encode()
    except Unavailable as error:
        result.unavailable = str(error)
        _say(f"{result.system.name}: stopped: {error}")
        child.close()
        return False
    _say(f"  {result.system.name}: {done.seconds:.2f} s" + ("" if counts else " (to warm up)"))
    result.tokens = done.tokens
    if result.system.name != FLOOR:
        result.compare(done.vectors, reference)
    if counts:
        result.seconds.append(done.seconds)
    return True


def _write(output: Path | None, report: str) -> None:
    if output:
        output.write_text(report)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

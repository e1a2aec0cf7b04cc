"""How fast the host side of one worker is: texts/s and Mtok/s with a device that is never the limit.

    python -m benchmarks.ours.host_side [--all] [--profile] [--other CHECKOUT] [--output FILE]

A backend stands in for a GPU (`stand_in.py`): everything that the GPU backend does on the host is done, batches cost
the host as many launches as on a GPU, and the device takes a given time per token. All else is real: a private Redis, a
pinned worker process, jobs, the tokenizer of all-MiniLM-L6-v2, the texts of W1. Redis, the worker and the producer
share the CPUs, as on a small machine.

A job is queued while the worker is stopped (SIGSTOP). It is timed from the first claim to the last vector stored, by
Redis' clock; submitting and reading are not timed. Some vectors of each chunk are compared with what their texts' ids
give.

With --other, the producer, the worker and Redis of another checkout take turns with this one's, job by job, in
alternating order, and ratios are of the same turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.ours.gpu_models import PLACE
from benchmarks.ours.host_side_report import Cell, Measured, Side, render

from embedctl_bench.engines.workloads import describe_workload, make_workload
from embedctl_bench.measuring.machine import Usage
from embedctl_bench.measuring.shapes import ModelShape, write_shape
from embedctl_bench.peers.models import Model, written

ROOT = Path(__file__).parents[2]
#: Operations that a batch begins on a GPU, by the dimensions of a model: 6 layers of 384, 24 of 1,024.
LAUNCHES = {384: 100, 1024: 390}
_HEADS = {384: 12, 1024: 16}
#: An H200 takes about as long for all-MiniLM-L6-v2 (nanoseconds).
NS_PER_TOKEN = 94.0
MODES = ("tokenised", "cached")
_THREADS, _CHUNKS = (1, 2, 4), (512, 2048, 4096, 8192)
_TEXTS, _QUICK_TEXTS = 8192, 1024
#: The vectors of a job fit a private Redis and its log (bytes).
_MOST_BYTES = 1 << 30
#: A job has at least so many chunks for each thread, so that its first ones count little.
_FEWEST_CHUNKS = 3


def main() -> None:
    """Run the command line."""
    arguments = _arguments()
    cells: list[Cell] = []
    sides = {"this": Side(ROOT)} | ({"other": Side(arguments.other.resolve())} if arguments.other else {})
    for side in sides.values():  # before anything is made, which takes a while
        if not (side.checkout / "producer" / "embedctl").is_dir():
            sys.exit(f"{side.checkout} is no checkout of embedctl")
    place = arguments.place.resolve()
    models = {dim: model_of(dim, place) for dim in arguments.dims}
    workload = make_workload("W1", _QUICK_TEXTS if arguments.quick else _TEXTS, models[arguments.dims[0]], place)
    setting = {"ns_per_token": arguments.ns_per_token, "cpus": arguments.cpus, "cache": str(place / "cache")}
    try:
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(Child.of(side.checkout, workload.path, profile=arguments.profile))
                for name, side in sides.items()
            }
            for mode, dim, threads in itertools.product(arguments.modes, arguments.dims, arguments.threads):
                launches = arguments.launches or LAUNCHES[dim]
                worker = {**setting, "model": str(models[dim].folder), "threads": threads, "launches": launches}
                for child in running.values():
                    child.tell(worker={**worker, "cached": mode == "cached"})
                for child in running.values():
                    child.answer()
                for chunk in arguments.chunks:
                    cells.append(Cell(mode, dim, threads, chunk, launches, arguments.ns_per_token))
                    _measure(cells[-1], running, arguments, len(workload.lengths))
                    _write(arguments.output, render(cells, sides, describe_workload(workload)))
    except KeyboardInterrupt:
        _say("stopped: the report has the measurements so far")
    report = render(cells, sides, describe_workload(workload))
    _write(arguments.output, report)
    print(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="host_side", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", help="dispatching threads, the class's prefetch (default: 4)")
    parser.add_argument("--chunks", type=int, nargs="+", help="texts of a chunk (default: 512 4096)")
    parser.add_argument("--dims", type=int, nargs="+", choices=list(LAUNCHES), help="dimensions (default: 384 1024)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="cached: tokenised beforehand")
    parser.add_argument("--all", action="store_true", help=f"threads {_THREADS}, chunks {_CHUNKS}")
    parser.add_argument("--ns-per-token", type=float, default=NS_PER_TOKEN, help=f"(default: {NS_PER_TOKEN:g})")
    parser.add_argument("--launches", type=int, help=f"a batch (default, by dimensions: {LAUNCHES})")
    parser.add_argument("--cpus", help="of the worker, such as 0-3 (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a job, about (default: 3)")
    parser.add_argument("--profile", action="store_true", help="say what the time goes to; costs some percent of it")
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="another checkout to compare with, by turns")
    parser.add_argument("--place", type=Path, default=PLACE, metavar="FOLDER", help="of models and texts that are kept")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Markdown, written after each cell")
    parser.add_argument("--quick", action="store_true", help="one cell of each mode, one round, to try the script")
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or (list(_THREADS) if arguments.all else [4])
    arguments.dims = arguments.dims or ([384] if arguments.quick else list(LAUNCHES))
    usual = [128] if arguments.quick else [512, 4096]
    arguments.chunks = arguments.chunks or (list(_CHUNKS) if arguments.all else usual)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.1
    most = _QUICK_TEXTS if arguments.quick else _TEXTS
    if max(arguments.chunks) > most:
        parser.error(f"--chunks: there are {most} texts, and equal texts in a chunk are encoded once")
    return arguments


def model_of(dim: int, place: Path) -> Model:
    """A model with vectors of this size and one layer, which never runs; its tokenizer is all-MiniLM-L6-v2's.

    Raises:
        ModelNotFound: all-MiniLM-L6-v2 is not installed.
    """
    folder = place / "models" / f"stand-in-{dim}"
    if not folder.is_dir():
        shape = ModelShape("bert", layers=1, hidden=dim, heads=_HEADS[dim], pooling="mean")
        written(folder, lambda into: write_shape(shape, into))
    return Model.in_folder(folder.name, folder)


@dataclass(frozen=True, slots=True)
class Child:
    """The process that measures one checkout."""

    process: subprocess.Popen[str]

    @classmethod
    @contextmanager
    def of(cls, checkout: Path, texts: Path, *, profile: bool) -> Iterator[Self]:
        """Start it, with that checkout's packages and this one's benchmark."""
        parts = [checkout / "producer", checkout / "workers", checkout / "config", ROOT]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ours.host_side_child"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, parts))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then lets the child end in good order
        )
        child = cls(process)
        try:
            package = child.ask(texts=str(texts), profile=profile)["package"]
            if not Path(package).is_relative_to(checkout / "producer"):
                sys.exit(f"{checkout} is no checkout of embedctl: {package} was imported")
            yield child
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request."""
        self.tell(**request)
        return self.answer()

    def tell(self, **request: Any) -> None:
        """Send a request, whose answer is to be read before the next one."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the request that was sent."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the measuring process ended: its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _measure(cell: Cell, running: Mapping[str, Child], arguments: argparse.Namespace, texts: int) -> None:
    """Run the cell's jobs by turns, after one on each side that encodes every text once."""
    rates = []
    for child in running.values():
        warm = Measured(**child.ask(run={"chunk": cell.chunk, "count": texts}))
        rates.append(warm.texts_per_s)
    count = _job_size(cell, max(rates) * arguments.seconds)
    before = Usage.read()
    for turn in range(arguments.rounds):
        for name in list(running) if turn % 2 else reversed(list(running)):
            cell.add(name, Measured(**running[name].ask(run={"chunk": cell.chunk, "count": count})))
    cell.others = Usage.read().since(before).others
    _say(f"{cell.name}: " + ", ".join(f"{name} {cell.texts_per_s(name):,.0f} texts/s" for name in running))


def _job_size(cell: Cell, wanted: float) -> int:
    """The texts of a job: whole chunks, about as many texts as wanted."""
    fewest = cell.chunk * cell.threads * _FEWEST_CHUNKS
    most = max(fewest, _MOST_BYTES // (4 * cell.dim))
    return round(min(max(wanted, fewest), most) / cell.chunk) * cell.chunk


def _write(output: Path | None, report: str) -> None:
    if output:
        output.write_text(report, encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

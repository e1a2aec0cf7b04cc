"""The report about the host side, as Markdown."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

from embedctl_config.cpu import cpu_name

_PACKAGES = ("torch", "tokenizers", "numpy", "celery", "kombu", "redis")
#: Places in the code where a thread only waits: for a lock, for Redis, for the device, for time to pass.
_WAITS = (
    ".wait", "_epoll.poll", "._read_from_socket", ".thread._worker", "StandInEvent.synchronize", "_OneTurn.turn",
)  # fmt: skip
#: Places of a profile that are shown.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Side:
    """A checkout that is measured."""

    checkout: Path

    @property
    def commit(self) -> str:
        """The commit that is checked out, with a plus sign if files were changed; the folder where git knows none."""
        git = ["git", "-C", str(self.checkout)]
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
        return (found.stdout.strip() or self.checkout.name) + ("+" if changed.stdout.strip() else "")


@dataclass(frozen=True, slots=True)
class Measured:
    """A job; the fields of `host_side_child.Run`."""

    seconds: float
    texts: int
    tokens: int
    chunks: int
    worst: float
    cpu: Mapping[str, float]
    threads: Mapping[str, float]
    holding: Mapping[str, float]
    samples: Sequence[tuple[str, str, int]]

    @property
    def texts_per_s(self) -> float:
        """The job's rate."""
        return self.texts / self.seconds

    @property
    def cpu_us_a_text(self) -> float:
        """CPU time that a text took while the clock ran, by the worker, Redis and the wait together (µs)."""
        return 1e6 * sum(self.cpu[part] for part in ("worker", "redis", "wait")) / self.texts


@dataclass(slots=True)
class Cell:
    """A way to set up the worker and the job, and the jobs of each side.

    Attributes:
        others: CPUs that processes of others took meanwhile.
    """

    mode: str
    dim: int
    threads: int
    chunk: int
    launches: int
    ns_per_token: float
    jobs: dict[str, list[Measured]] = field(default_factory=dict)
    others: float = 0.0

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.mode}, {self.dim} dimensions, {self.threads} threads, chunks of {self.chunk:,}"

    def add(self, side: str, job: Measured) -> None:
        """Note a job."""
        self.jobs.setdefault(side, []).append(job)

    def texts_per_s(self, side: str) -> float:
        """The median rate of a side."""
        return median(job.texts_per_s for job in self.jobs[side])

    def row(self, sides: Sequence[str]) -> Iterator[str]:
        """Its row of the table of rates."""
        yield from (self.mode, str(self.dim), str(self.threads), f"{self.chunk:,}")
        for side in sides:
            jobs = self.jobs[side]
            rates = [job.texts_per_s for job in jobs]
            tokens_a_s = median(job.tokens / job.seconds for job in jobs)
            yield f"{median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})"
            yield f"{tokens_a_s / 1e6:.2f}"
            yield f"{median(1000 * job.seconds / job.chunks for job in jobs):.1f}"
            yield f"{tokens_a_s * self.ns_per_token / 1e9:.0%}"
        if len(sides) > 1:
            ours, others = (self.jobs[side] for side in sides)
            ratios = [a.texts_per_s / b.texts_per_s for a, b in zip(ours, others, strict=False)]
            yield f"**{median(ratios):.2f}** ({min(ratios):.2f}–{max(ratios):.2f})"
        yield f"{self.others:.1f}"


def render(cells: Sequence[Cell], sides: Mapping[str, Side], workload: str) -> str:
    """The whole report."""
    done = [cell for cell in cells if set(cell.jobs) == set(sides)]
    return "\n".join([*_head(cells, sides, workload), "", *_rates(done, list(sides)), "", *_profiles(done), ""])


def _head(cells: Sequence[Cell], sides: Mapping[str, Side], workload: str) -> Iterator[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    launches = {cell.dim: cell.launches for cell in cells}
    yield "# The host side of one worker, with a stand-in for a GPU"
    yield ""
    yield f"- {time.strftime('%Y-%m-%d')}, {len(os.sched_getaffinity(0))} CPUs of {cpu_name()}"
    yield "  for Redis, the worker and the producer together."
    yield f"- Python {platform.python_version()}, {packages}."
    yield "- " + "; ".join(f"{name}: {side.commit}" for name, side in sides.items()) + "."
    yield f"- {workload}. No chunk holds a text twice."
    for dim, count in launches.items():
        yield f"- {dim} dimensions: {count} launches a batch; {cells[0].ns_per_token:g} ns a token on the device."
    yield "- A job is queued before the clock starts. It is timed from its first claim to its last vector stored, so"
    yield "  the first chunks' preparation counts, and submitting and reading do not. All settings but the chunks' size"
    yield "  and the class's `prefetch` are the defaults."
    yield "- Figures are medians of rounds, with the least and the greatest. *device*: the share of time in which a"
    yield "  device of this speed computes. *others*: CPUs that other processes of the machine took meanwhile."


def _rates(cells: Sequence[Cell], sides: Sequence[str]) -> Iterator[str]:
    headings = ["mode", "dim", "threads", "chunk"]
    for side in sides:
        headings += [f"{side}: texts/s", "Mtok/s", "ms a chunk", "device"]
    if len(sides) > 1:
        headings.append(" / ".join(sides))
    headings.append("others")
    yield from _table(headings, [list(cell.row(sides)) for cell in cells])


def _profiles(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## CPU time of a chunk (ms)"
    yield ""
    yield "`submit` and `read` are the producer's, before and after the clock; `wait` is its wait for the job's end."
    yield "*µs a text*: worker, Redis and wait together; it depends less on other load than the rate does."
    yield ""
    parts = ("worker", "redis", "wait", "submit", "read")
    rows = []
    for cell in cells:
        for side, jobs in cell.jobs.items():
            spent = [f"{median(1000 * job.cpu[part] / job.chunks for job in jobs):.2f}" for part in parts]
            rows.append([cell.name, side, *spent, f"{median(job.cpu_us_a_text for job in jobs):.1f}"])
    yield from _table(["cell", "side", *parts, "µs a text"], rows)
    for cell in cells:
        for side, jobs in cell.jobs.items():
            if jobs[-1].samples:
                yield from _profile(f"{cell.name}: {side}", jobs[-1])


def _profile(title: str, job: Measured) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    held = job.holding
    yield (
        f"The GIL was held for {sum(held.values()):.0%} of the time."
        if held
        else "Who holds the GIL can't be seen on this Python or this machine."
    )
    yield ""
    rows = [
        [name, f"{1000 * job.threads.get(name, 0.0) / job.chunks:.2f}", f"{held[name]:.1%}" if name in held else "–"]
        for name in sorted(job.threads.keys() | held.keys(), key=lambda name: -job.threads.get(name, 0.0))
        if job.threads.get(name, 0.0) / job.seconds >= 0.005 or held.get(name, 0.0) >= 0.005
    ]
    yield from _table(["thread", "CPU ms a chunk", "holds the GIL"], rows)
    yield ""
    yield "Samples of these threads by place. A thread that runs is mostly seen where it gives up the GIL."
    yield ""
    shown = {row[0] for row in rows} - {"sampler"}
    places: Counter[tuple[str, str]] = Counter()
    for thread, place, count in job.samples:
        if thread in shown:
            places[thread.rstrip("_-0123456789"), place] += count
    found = [
        [kind, f"`{place}`", f"{count / places.total():.1%}", "waits" if place.endswith(_WAITS) else ""]
        for (kind, place), count in places.most_common(_SHOWN)
    ]
    yield from _table(["thread", "place", "samples", ""], found)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join('---' for _ in headings)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"

"""Measurements that outlive their command: each is kept at once and not repeated."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from embedctl_bench.measuring.machine import measured_load, versions
from embedctl_config.cpu import cpu_identity
from embedctl_config.durable import write
from embedctl_config.errors import OutputError

#: The file in the folder of reports; every line is one measurement of one of the benchmarks.
FILE = "measurements.jsonl"

T = TypeVar("T")


class Session:
    """The measurements of one benchmark, in a folder.

    Use it as a context manager. Ctrl-C raises KeyboardInterrupt from :meth:`step`, as everywhere; what was measured
    before is kept, `stopped` is true, and the command renders what there is.

    Attributes:
        name: of the benchmark.
        stopped: whether Ctrl-C ended it.
    """

    def __init__(
        self, folder: Path, name: str, *, fresh: bool, plan: int, conditions: Mapping[str, object] | None = None
    ) -> None:
        """Read the measurements of earlier runs from the folder, or with `fresh` remove them, else OutputError.

        Args:
            plan: the expected number of steps.
            conditions: facts that must be equal for an earlier measurement to count, such as the CPUs used, besides
                the benchmark, the kind of CPU and the versions. Models and classes belong to a step's key.
        """
        self.stopped = False
        self.name, self._path = name, folder / FILE
        facts = [cpu_identity(), versions(), conditions or {}]
        self._identity = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self._plan = plan
        self._new: list[dict[str, Any]] = []
        self._reused: list[dict[str, Any]] = []
        self._done: set[str] = set()
        self._kept: dict[str, dict[str, Any]] = {}
        self._load = os.getloadavg()[0]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = [line for line in self._read() if not fresh or line.get("benchmark") != name]
            write(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())
            self._stream = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"measurements can't be kept in {folder}: {error}") from error
        for line in lines:
            if line.get("benchmark") == name and line.get("identity") == self._identity:
                self._kept[line["key"]] = line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped = self.stopped or isinstance(error, KeyboardInterrupt)
        self._stream.close()
        if self.stopped:
            self.say(f"stopped; what was measured is kept in {self._path}, and the same command goes on from there")

    def step(self, key: str, measure: Callable[[], T], needs: Collection[str] = ()) -> T:
        """The value that an earlier run kept under this key; else call `measure`, keep its value and return it.

        Args:
            key: unique within the benchmark; it includes model and class.
            measure: returns JSON data; if it raises an error, nothing is kept.
            needs: what a kept value must hold to count.

        Raises:
            ValueError: an earlier step had this key.
            OutputError: the measurement can't be kept.
        """
        if key in self._done:
            raise ValueError(f"two steps have the key {key!r}")
        self._done.add(key)
        kept = self._kept.get(key)
        if kept and all(each in kept["value"] for each in needs):
            self._reused.append(kept)
            self.say(f"{self.name} {len(self._done)}/{self._plan}: {key}: measured before; {self.left()}")
            return cast(T, kept["value"])
        with measured_load() as load:
            value = measure()
        line: dict[str, Any] = {"benchmark": self.name, "identity": self._identity, "key": key, "at": _now()}
        line |= {name: round(figure, 3) for name, figure in load.items()} | {"value": value}
        try:
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()
        except OSError as error:
            raise OutputError(f"{self._path} can't be written to: {error}") from error
        self._new.append(line)
        self.say(f"{self.name} {len(self._done)}/{self._plan}: {key}: {load['seconds']:.1f} s; {self.left()}")
        return value

    def left(self) -> str:
        """The time left, if the remaining steps take as long as the middle one so far: the first ones may install."""
        to_come = self._plan - len(self._done)
        if to_come <= 0 or not self._new:
            return "time left unknown" if to_come > 0 else "done"
        left = to_come * statistics.median(line["seconds"] for line in self._new)
        if left < 90:
            return f"about {left:.0f} s left"
        return f"about {left / 60:.0f} min left" if left < 5400 else f"about {left / 3600:.1f} h left"

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def meanwhile(self) -> dict[str, object]:
        """Load of the machine during the measurements, by name, for a report's facts of the machine."""
        facts: dict[str, object] = {}
        if self._new or not self._reused:
            facts["load before"] = f"{self._load:.2f}"
            facts["measured"] = f"{_count(self._new)}, ended {_now()}"
        # Clock ticks are too coarse for the load during shorter steps.
        if long := [line for line in (*self._reused, *self._new) if line["seconds"] >= 1]:
            for name, key in (("used by other processes", "others_cpus"), ("stolen by the hypervisor", "stolen_cpus")):
                used = [line[key] for line in long]
                facts[f"CPUs {name} meanwhile"] = (
                    f"median {statistics.median(used):.2f}, most {max(used):.2f} (of {len(used)} steps)"
                )
        if self._reused:
            dates = [line["at"] for line in self._reused]
            when = dates[0] if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"
            facts["taken from earlier runs"] = f"{_count(self._reused)}, of {when}, with the same versions and CPUs"
        return facts

    def _read(self) -> list[dict[str, Any]]:
        """The file's lines. One that was cut short is left out."""
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        lines = []
        for line in text.splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
        return lines


def _count(lines: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(lines)} steps in {sum(line['seconds'] for line in lines) / 60:.1f} minutes"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")

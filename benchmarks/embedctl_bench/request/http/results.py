"""What `embedctl bench request --http` measures of each server."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embedctl_bench.measuring.sampling import is_noisy, percentiles, spread
from embedctl_bench.request.http.loads import Load


@dataclass(frozen=True, slots=True)
class Turn:
    """A server's turn with a load.

    Attributes:
        seconds: from the first request to the last answer.
        latencies: of each request (seconds).
    """

    seconds: float
    latencies: Sequence[float]

    @property
    def median_s(self) -> float:
        """The median latency (seconds)."""
        return statistics.median(self.latencies)

    def to_json(self) -> dict[str, Any]:
        """For the file of measurements."""
        return {"seconds": self.seconds, "latencies": [round(each, 6) for each in self.latencies]}


@dataclass(slots=True)
class LoadResult:
    """The turns of every server with one load, by the server's name; the turns of a round have the same place."""

    load: Load
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def rate(self, server: str) -> float:
        """Texts in a second: the median of the turns."""
        return self.load.texts / statistics.median(turn.seconds for turn in self.turns[server])

    def latency(self, server: str, which: str) -> float | None:
        """A percentile of all requests of all turns (ms); None if there are too few."""
        return percentiles([each for turn in self.turns[server] for each in turn.latencies])[which]

    def times(self, server: str, other: str) -> float | None:
        """The rate as a multiple of another server's: the median of the rounds. None if that did not run."""
        pairs = list(zip(self.turns.get(server, ()), self.turns.get(other, ()), strict=False))
        return statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs) if pairs else None

    def behind(self, server: str, other: str) -> list[float]:
        """How much larger a server's median latency is than another one's, in each round (ms). Empty if one did not
        run."""
        pairs = zip(self.turns.get(server, ()), self.turns.get(other, ()), strict=False)
        return [1000 * (ours.median_s - theirs.median_s) for ours, theirs in pairs]

    def row(self, server: str) -> dict[str, object]:
        """A server's line in the table."""
        seconds = [turn.seconds for turn in self.turns[server]]
        several = len(seconds) > 1
        return {
            "load": self.load.words,
            **{name: self.latency(server, name) for name in ("p50", "p90", "p99")},
            "texts_per_s": self.rate(server),
            "requests_per_s": len(self.load.requests) / statistics.median(seconds),
            "spread_percent": 100 * spread(seconds) if several else None,
            "_noisy": several and is_noisy(seconds),
        }


@dataclass(slots=True)
class HttpResult:
    """All loads of one model.

    Attributes:
        name: the model as the command line has it.
        labels, versions: of each server that ran, by its name.
        cosines: the least cosine of each server's vectors and those of the first server, by its name.
        failed: why a server did not run, by its name.
    """

    name: str
    hardware: str
    loads: list[LoadResult] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    cosines: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

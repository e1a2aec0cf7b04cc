"""A short benchmark of a loaded model: how fast it encodes texts in a worker's batches, and tokenises them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.measuring.rates import Load, encoding_rate, loads_for, tokenising_rate
from embedctl_workers.tables import table

#: The number of rounds, and the time of each measurement (seconds): about ten seconds in all.
ROUNDS = 5
_ENCODING_S, _TOKENISING_S = 0.8, 0.1
_HEAD = ("texts", "tokens a text", "texts/s", "tokens/s")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of a figure."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.least * factor, self.most * factor)

    def __format__(self, form: str) -> str:
        """`1.05 (0.99 to 1.10)`, each figure in this form."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast texts of one kind, of `tokens_per_text` in the mean, are encoded."""

    name: str
    tokens_per_text: float
    tokens_per_s: Spread  #: the rate of encoding texts that are tokenised already
    tokenised_per_s: Spread  #: the rate of tokenising alone, tokens/s

    @property
    def texts_per_s(self) -> Spread:
        """The rate of encoding in texts/s."""
        return self.tokens_per_s.times(1 / self.tokens_per_text)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "texts_per_s": asdict(self.texts_per_s)}

    def as_row(self) -> tuple[str, ...]:
        """This rate's row of the table."""
        return (
            self.name,
            f"{self.tokens_per_text:.0f}",
            f"{self.texts_per_s:,.0f}",
            f"{self.tokens_per_s:,.0f}",
        )


@dataclass(frozen=True, slots=True)
class Benchmark:
    """All rates, measured in the same rounds."""

    rates: Sequence[Rate]

    def as_json(self) -> dict[str, object]:
        return {"rounds": ROUNDS, "rates": [rate.as_json() for rate in self.rates]}

    def __str__(self) -> str:
        lines = [f"speed, median of {ROUNDS} rounds (least to most)"]
        lines += table([_HEAD, *(rate.as_row() for rate in self.rates)], figures=range(1, len(_HEAD)))
        lines += [
            f"tokenising {rate.name}, not included above: {rate.tokenised_per_s:,.0f} tokens/s" for rate in self.rates
        ]
        return "\n".join(lines)


def benchmark(encoder: ChunkEncoder) -> Benchmark:
    """Measure everything by turns, so that a drift of the machine affects all figures alike. A first round warms up.

    A ModelError if a text can't be encoded; DeviceLost by the backend.
    """
    loads = loads_for(encoder)
    rounds = [[_round(encoder, load) for load in loads] for _ in range(1 + ROUNDS)]
    return Benchmark([_rate(load, figures) for load, figures in zip(loads, zip(*rounds[1:], strict=True), strict=True)])


def _round(encoder: ChunkEncoder, load: Load) -> tuple[float, float]:
    """The rates of encoding and of tokenising a chunk, tokens/s."""
    return encoding_rate(encoder, load, _ENCODING_S), tokenising_rate(encoder, load, _TOKENISING_S)


def _rate(load: Load, figures: Sequence[tuple[float, float]]) -> Rate:
    encoded, tokenised = zip(*figures, strict=True)
    return Rate(load.name, float(load.lengths.mean()), Spread.of(encoded), Spread.of(tokenised))

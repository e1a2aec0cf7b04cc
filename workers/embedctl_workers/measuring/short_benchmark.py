"""A short benchmark of a loaded model: its rates, and their share of the device's rate in matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from embedctl_config.hardware import HardwareClass
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.measuring.flops import EncoderShape, shape_of
from embedctl_workers.measuring.matrix_products import MatrixProducts, matrix_products
from embedctl_workers.measuring.rates import Load, encoding_rate, loads_for, tokenising_rate
from embedctl_workers.measuring.spread import Spread
from embedctl_workers.tables import table

#: The number of rounds, and the time of each measurement (seconds): a quarter of a minute in all.
ROUNDS = 5
_ENCODING_S, _TOKENISING_S, _MATRIX_S = 0.8, 0.1, 0.5
_HEAD = ("texts", "tokens a text", "texts/s", "tokens/s", "share of the matrix rate")


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast texts of one kind, of `tokens_per_text` in the mean, are encoded."""

    name: str
    tokens_per_text: float
    tokens_per_s: Spread  #: the rate of encoding texts that are tokenised already
    tokenised_per_s: Spread  #: the rate of tokenising alone, tokens/s
    #: of the matrix rate of the same round, 0 to 1; None if there is no matrix rate, or if the model's operations are
    #: unknown
    share: Spread | None

    @property
    def texts_per_s(self) -> Spread:
        """The rate of encoding in texts/s."""
        return self.tokens_per_s.times(1 / self.tokens_per_text)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tokens_per_text": self.tokens_per_text,
            "texts_per_s": self.texts_per_s.as_json(),
            "tokens_per_s": self.tokens_per_s.as_json(),
            "tokenised_per_s": self.tokenised_per_s.as_json(),
            "share_of_matrix_rate": self.share.as_json() if self.share else None,
        }

    def as_row(self) -> tuple[str, ...]:
        """This rate's row of the table."""
        return (
            self.name,
            f"{self.tokens_per_text:.0f}",
            f"{self.texts_per_s:,.0f}",
            f"{self.tokens_per_s:,.0f}",
            f"{self.share:.2f}" if self.share else "–",
        )


@dataclass(frozen=True, slots=True)
class Benchmark:
    """All rates, measured in the same rounds; `notes` tell why a figure is missing.

    `matrix` is the matrix product that rates are compared with, in words; empty if there is none.
    """

    rates: Sequence[Rate]
    matrix: str
    matrix_flop_per_s: Spread | None
    notes: Sequence[str]

    def as_json(self) -> dict[str, object]:
        return {
            "rounds": ROUNDS,
            "rates": [rate.as_json() for rate in self.rates],
            "matrix": self.matrix or None,
            "matrix_flop_per_s": self.matrix_flop_per_s.as_json() if self.matrix_flop_per_s else None,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"speed, median of {ROUNDS} rounds (least to most)"]
        lines += table([_HEAD, *(rate.as_row() for rate in self.rates)], figures=range(1, len(_HEAD)))
        lines += [
            f"tokenising {rate.name}, not included above: {rate.tokenised_per_s:,.0f} tokens/s" for rate in self.rates
        ]
        if self.matrix_flop_per_s:
            lines.append(f"matrix rate: {self.matrix_flop_per_s.times(1e-12):.3g} TFLOP/s, {self.matrix}")
        return "\n".join([*lines, *self.notes])


@dataclass(slots=True)
class _Rounds:
    """The measurements of one chunk, tokens/s, one figure per round."""

    load: Load
    encoded: list[float] = field(default_factory=list)
    tokenised: list[float] = field(default_factory=list)

    def rate(self, shape: EncoderShape | None, matrix: Sequence[float]) -> Rate:
        lengths = self.load.lengths
        tokens = float(lengths.sum())
        share = None
        if shape is not None and matrix:
            flop = shape.flop(lengths) / tokens
            share = Spread.of([rate * flop / most for rate, most in zip(self.encoded, matrix, strict=True)])
        return Rate(
            name=self.load.name,
            tokens_per_text=tokens / len(lengths),
            tokens_per_s=Spread.of(self.encoded),
            tokenised_per_s=Spread.of(self.tokenised),
            share=share,
        )


def benchmark(encoder: ChunkEncoder, hardware: HardwareClass, threads: int) -> Benchmark:
    """Measure everything in turn, after a warm-up round, so that a drift of the machine affects all figures alike.

    A ModelError if a text can't be encoded; DeviceLost by the backend.
    """
    notes = []
    products = matrix_products(hardware, threads)
    if isinstance(products, str):
        notes.append(f"no matrix rate: {products}")
    reference = encoder.backend.reference
    shape = shape_of(reference.files.folder) if reference else None
    if shape is None:
        notes.append("no share of the matrix rate: the operations of a model of this architecture are unknown")
    rounds, matrix = _measure(encoder, None if isinstance(products, str) else products)
    return Benchmark(
        rates=[each.rate(shape, matrix) for each in rounds],
        matrix="" if isinstance(products, str) else products.what,
        matrix_flop_per_s=Spread.of(matrix) if matrix else None,
        notes=notes,
    )


def _measure(encoder: ChunkEncoder, products: MatrixProducts | None) -> tuple[list[_Rounds], list[float]]:
    """The rounds of each chunk, and the matrix rate of each round, FLOP/s."""
    found, matrix = [_Rounds(load) for load in loads_for(encoder)], []
    for _ in range(1 + ROUNDS):
        for each in found:
            each.encoded.append(encoding_rate(encoder, each.load, _ENCODING_S))
            each.tokenised.append(tokenising_rate(encoder, each.load, _TOKENISING_S))
        if products is not None:
            matrix.append(products.rate(_MATRIX_S))
    for each in found:
        del each.encoded[0], each.tokenised[0]
    return found, matrix[1:]

"""A short benchmark of a loaded model: its rates, and their share of the device's rate in matrix products."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from embedctl_config.hardware import HardwareClass
from embedctl_workers.arrays.tokens import Rows
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.measuring.matrix_products import MatrixProducts, matrix_products
from embedctl_workers.measuring.rates import Load, encoding_rate, loads_for, tokenising_rate
from embedctl_workers.tables import table

#: Encoders of one design: attention with four square matrices, then a feed-forward of two. Model type → the names of
#: hidden size, inner size, number of layers and of heads in its configuration.
_BERT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_KNOWN: Mapping[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "mpnet"), _BERT),
    "distilbert": ("dim", "hidden_dim", "n_layers", "n_heads"),
}
#: The number of rounds, and the time of each measurement (seconds): a quarter of a minute in all.
ROUNDS = 5
_ENCODING_S, _TOKENISING_S, _MATRIX_S = 0.8, 0.1, 0.5
_HEAD = ("texts", "tokens a text", "texts/s", "tokens/s", "share of the matrix rate")


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of an encoder of the BERT family: `layers` layers, `hidden` wide, with a feed-forward `inner` wide."""

    hidden: int
    inner: int
    layers: int
    heads: int

    def flop(self, lengths: Rows) -> float:
        """Operations for texts of these lengths (tokens): multiplications and additions of matrix products.

        The weights cost 2 × layers × (4 × hidden² + 2 × hidden × inner) per token: a matrix of n weights is n
        multiplications and n additions per token, and a layer has query, key, value, output and the two matrices of
        the feed-forward. Attention costs 4 × layers × hidden × length per token: every token meets every token of its
        text, twice. Kaplan et al. count in this way (Scaling Laws for Neural Language Models, table 1, with both
        directions of attention). Padding, embeddings, pooling and all that is not a matrix product are not counted.
        """
        weights = 2 * self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.inner)
        tokens = lengths.astype(float)
        return float(weights * tokens.sum() + 4 * self.layers * self.hidden * (tokens**2).sum())


def shape_of(folder: Path) -> EncoderShape | None:
    """The shape of the model in a folder; None if its architecture is unknown here."""
    config = _config(folder)
    names = _KNOWN.get(str(config.get("model_type")))
    if names is None or any(not isinstance(config.get(name), int) for name in names):
        return None
    return EncoderShape(*(int(config[name]) for name in names))


def _config(folder: Path) -> dict[str, Any]:
    """The transformer's configuration, from the folder or that of the model's first module; empty if there is none."""
    for path in (folder / "config.json", *sorted(folder.glob("0_*/config.json"))):
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            return config
    return {}


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

    def as_json(self) -> dict[str, float]:
        return asdict(self)

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

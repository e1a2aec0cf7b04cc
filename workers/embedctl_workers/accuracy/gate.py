"""Are a backend's vectors those of the model? Measured before a worker takes its first ticket."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from embedctl_config.errors import GateFailed
from embedctl_config.hardware import HardwareClass, Thresholds
from embedctl_config.wire import ChunkInput, RecordKind
from embedctl_workers.backends.base import Host, Vectors
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.prepared import Prepared
from embedctl_workers.models.gate_texts import PROMPT, TEXTS
from embedctl_workers.models.references import references_for

_Float64 = npt.NDArray[np.float64]

_NAMES = tuple(TEXTS)
#: The longest text that is encoded more than once (tokens), and how many are encoded alone and in batches of our own.
_SHORT = 64
_FEW = 6
#: How far the length of a normalised vector may be from 1.
_UNIT_ERROR = 1e-5
#: The table's columns that hold words and not figures.
_WORDS = (0, 7, 8)


def gate_texts() -> Sequence[str]:
    """The texts of :func:`references_for`'s rows."""
    return list(TEXTS.values())


@dataclass(frozen=True, slots=True)
class Measured:
    """How far vectors are from others of the same texts.

    Attributes:
        max_abs_error: largest difference of a component, both scaled to unit length; NaN if any vector holds one.
        min_cosine, mean_cosine: over the texts.
        length_error: largest relative difference in length.
        worst: the row that differs most.
    """

    max_abs_error: float
    min_cosine: float
    mean_cosine: float
    length_error: float
    worst: int

    def within(self, bounds: Thresholds, length_error: float = math.inf) -> bool:
        """Whether every figure is; NaN never is."""
        return (
            self.max_abs_error <= bounds.max_abs_error
            and self.min_cosine >= bounds.min_cosine
            and self.mean_cosine >= bounds.mean_cosine
            and self.length_error <= length_error
        )


def measure(vectors: Vectors, references: Vectors) -> Measured:
    """Compare vectors, row by row; float32, texts × dimensions, of any length.

    Raises:
        ValueError: they are not of the same shape.
    """
    if vectors.shape != references.shape:
        raise ValueError(f"vectors of shape {vectors.shape} can't be compared with {references.shape}")
    found, found_length = _split(vectors)
    expected, expected_length = _split(references)
    apart = np.abs(found - expected).max(axis=1)
    cosines = (found * expected).sum(axis=1)
    return Measured(
        max_abs_error=float(apart.max()),
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        length_error=float(np.abs((found_length - expected_length) / _or_one(expected_length)).max()),
        worst=int(np.argmax(apart)),  # a row of NaN counts as the largest
    )


def _unit(vectors: Vectors) -> Vectors:
    directions, _ = _split(vectors)
    return directions.astype(np.float32)


def _split(vectors: Vectors) -> tuple[_Float64, _Float64]:
    """Directions and lengths, float64; a vector of length 0 stays as it is."""
    exact = vectors.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1)
    return exact / _or_one(lengths)[:, None], lengths


def _or_one(lengths: _Float64) -> _Float64:
    return np.where(lengths == 0, 1, lengths)


@dataclass(frozen=True, slots=True)
class Check:
    """One way to encode the texts, what came of it and what it is held to.

    Attributes:
        texts: how many; of a few, the mean cosine says nothing and has no bound.
        length_bound: of `measured.length_error`.
        normalized: whether that is the distance from length 1.
        worst: the name of the text that differs most.
        failures: text → why it has no vector.
    """

    name: str
    texts: int
    measured: Measured
    bounds: Thresholds
    length_bound: float
    normalized: bool
    worst: str
    failures: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether every text has a vector, and all figures are within their bounds."""
        return not self.failures and self.measured.within(self.bounds, self.length_bound)

    def as_row(self) -> tuple[str, ...]:
        """Its line of the report's table."""
        found = self.measured
        length = f"{found.length_error:.1e}"
        return (
            self.name,
            str(self.texts),
            f"{found.max_abs_error:.1e}",
            f"{found.min_cosine:.6f}",
            f"{found.mean_cosine:.6f}" if self.texts > _FEW + 1 else "",
            length if self.normalized else "",
            "" if self.normalized else length,
            self.worst,
            "ok" if self.passed else "FAILED",
        )


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one model as one class runs it, against torch in fp32: the first in the batches that a chunk would
    be cut into, the second of raw vectors."""

    title: str
    bounds: Thresholds
    overrides: str
    checks: Sequence[Check]

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)

    @property
    def figures(self) -> str:
        """The first check in a few words."""
        found = self.checks[0].measured
        return f"max abs {found.max_abs_error:.1e}, cosine min {found.min_cosine:.6f} mean {found.mean_cosine:.6f}"

    def as_json(self) -> dict[str, object]:
        """Everything in it, for programs; null is a figure that is no finite number, or no bound."""
        return {
            "title": self.title,
            "passed": self.passed,
            "bounds": _finite(self.bounds),
            "overrides": self.overrides,
            "checks": [
                {
                    "name": check.name,
                    "texts": check.texts,
                    "passed": check.passed,
                    **_finite(check.measured),
                    "length_bound": check.length_bound,
                    "normalized": check.normalized,
                    "worst": check.worst,
                    "failures": dict(check.failures),
                }
                for check in self.checks
            ],
        }

    def __str__(self) -> str:
        """A table for people."""
        bounds = self.bounds
        rows = [
            ("check", "texts", "max abs", "min cosine", "mean cosine", "unit length", "raw length", "worst text", ""),
            (
                "bound",
                "",
                f"{bounds.max_abs_error:.1e}" if math.isfinite(bounds.max_abs_error) else "",
                f"{bounds.min_cosine:.6f}" if bounds.min_cosine > -1 else "",
                f"{bounds.mean_cosine:.6f}" if bounds.mean_cosine > -1 else "",
                *(f"{check.length_bound:.1e}" for check in self.checks[:2]),
                "",
                "",
            ),
            *(check.as_row() for check in self.checks),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                f"{cell:{'<' if at in _WORDS else '>'}{width}}"
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lost = [f"{check.name}: text {name!r}: {why}" for check in self.checks for name, why in check.failures.items()]
        own = [f"bounds of the class's own: {self.overrides}"] if self.overrides else []
        return "\n".join([self.title, *lines, *lost, *own])


def _finite(figures: Measured | Thresholds) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(figures).items()}


def run_gate(encoder: ChunkEncoder, hardware: HardwareClass, host: Host) -> Report | None:
    """Hold a loaded model to its class's promise.

    Returns:
        The report of a model that passed; None for a backend of which nothing is promised.

    Raises:
        GateFailed: it did not pass; the message is the table.
        MissingExtra, ModelError: there are no references; see :func:`references_for`.
    """
    report = measure_backend(encoder, hardware, host)
    if report is not None and not report.passed:
        raise GateFailed(f"the accuracy gate failed: {report}")
    return report


def measure_backend(encoder: ChunkEncoder, hardware: HardwareClass, host: Host) -> Report | None:
    """As :func:`run_gate`, and without raising where a figure is beyond its bound.

    Raises:
        GateFailed: the vectors are not as long as the references.
        MissingExtra, ModelError: as for :func:`run_gate`.
    """
    backend = encoder.backend
    if backend.reference is None:
        return None
    files = backend.reference.files
    plain, prompted = references_for(files, host), references_for(files, host, prompt=PROMPT)
    if backend.dim != plain.shape[1]:
        raise GateFailed(
            f"the accuracy gate failed: vectors of model {files.name!r} have {plain.shape[1]} dimensions in torch, and "
            f"{backend.dim} in the backend {hardware.backend!r}"
        )
    bounds = hardware.thresholds(backend.reference.bounds)
    return Report(
        title=f"model {files.name}, backend {hardware.backend} ({backend.engine}), {hardware.precision}, "
        "against torch in fp32",
        bounds=bounds,
        overrides=hardware.overrides_in_words,
        checks=_Gate(encoder, bounds).checks(plain, prompted),
    )


class _Gate:
    """Encodes the texts as chunks are encoded, in batches as they come or of its own."""

    def __init__(self, encoder: ChunkEncoder, bounds: Thresholds) -> None:
        self._encoder = encoder
        self._bounds = bounds
        # The largest error of a vector that these bounds let pass, and so of its length: an error e, relative to that,
        # turns a vector to a cosine of 1 - e²/2.
        self._raw_error = min(
            bounds.max_abs_error * math.sqrt(encoder.backend.dim), math.sqrt(2 * (1 - bounds.min_cosine))
        )

    def checks(self, plain: Vectors, prompted: Vectors) -> list[Check]:
        every = range(len(_NAMES))
        prepared = self._prepare(every)
        lengths = prepared.tokens.lengths.tolist()
        largest = max((max(lengths[row] for row in batch) * len(batch) for batch in prepared.batches), default=0)
        together = self._encode(every, prepared)

        order = sorted(every, key=lengths.__getitem__)
        short = [row for row in order if lengths[row] <= _SHORT]
        prompted_raw = self._encode(short, self._prepare(short, prompt=PROMPT, normalize=False))

        few = short[:: math.ceil(len(short) / _FEW)]
        longer = order[min(len(short), len(order) - 1)]
        padded = few[: max(1, largest // lengths[longer] - 1)]
        alone = self._encode(few, batches=[[at] for at in range(len(few))])
        beside = self._encode([*padded, longer], batches=[[len(padded), *range(len(padded))]])
        reverse = self._encode(few, batches=[range(len(few))[::-1]])
        return [
            self._check("in batches", together, _unit(plain)),
            self._check("prompt, raw", prompted_raw, prompted[short], normalized=False),
            self._check("alone", alone, _unit(plain[few])),
            self._check("beside a longer text", beside, _unit(plain[[*padded, longer]])),
            self._check("in another order", reverse, _unit(plain[few])),
        ]

    def _prepare(self, rows: Sequence[int], *, prompt: str | None = None, normalize: bool = True) -> Prepared:
        texts = [TEXTS[_NAMES[row]].encode() for row in rows]
        chunk = ChunkInput(first=0, kinds=bytes([RecordKind.TEXT] * len(texts)), texts=texts)
        return self._encoder.prepare(chunk, {"prompt": prompt, "normalize": normalize})

    def _encode(
        self, rows: Sequence[int], prepared: Prepared | None = None, batches: Sequence[Sequence[int]] = ()
    ) -> _Encoded:
        prepared = prepared or self._prepare(rows)
        if batches:
            prepared = replace(prepared, batches=[np.array(batch, np.int64) for batch in batches])
        encoded = self._encoder.encode(prepared)
        names = [_NAMES[row] for row in rows]
        return _Encoded(names, encoded.vectors, {names[error.row]: error.message for error in encoded.errors})

    def _check(self, name: str, found: _Encoded, expected: Vectors, *, normalized: bool = True) -> Check:
        measured = measure(found.vectors, expected)
        texts = len(found.names)
        return Check(
            name=name,
            texts=texts,
            measured=measured,
            bounds=self._bounds if texts > _FEW + 1 else replace(self._bounds, mean_cosine=-1.0),
            length_bound=_UNIT_ERROR if normalized else self._raw_error,
            normalized=normalized,
            worst=found.names[measured.worst],
            failures=found.failures,
        )


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Vectors of texts, float32, texts × dimensions, and by name why texts have none."""

    names: Sequence[str]
    vectors: Vectors
    failures: Mapping[str, str]

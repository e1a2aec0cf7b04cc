"""The accuracy gate: compares a backend's vectors with the model's, before a worker takes its first chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from embedctl_config.errors import GateFailed
from embedctl_config.hardware import HardwareClass, Thresholds
from embedctl_config.outputs import Output
from embedctl_config.wire import ChunkInput, RecordKind
from embedctl_workers.accuracy.ranking import Agreement, agreements
from embedctl_workers.accuracy.report import FEW, Check, Report
from embedctl_workers.arrays.distance import Measured, measure
from embedctl_workers.arrays.halves import rounded
from embedctl_workers.arrays.outputs import in_rows
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.prepared import Prepared
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import files_in, note, noted, software
from embedctl_workers.models.gate_texts import KNOWN_GOOD, PROMPT, TEXTS
from embedctl_workers.models.references import references_for

_NAMES = tuple(TEXTS)
#: The longest text that is encoded more than once (tokens).
_SHORT = 64
#: How far the length of a normalised vector may be from 1.
_UNIT_ERROR = 1e-5
#: How far a weight, or a number of a token's vector, may be from the reference: by this part of it, and by this much.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-4
_OTHERWISE = f"a weight, or a number of a token's vector, is off by more than {_ABSOLUTE:g}, or there are others"


def run_gate(encoder: ChunkEncoder, hardware: HardwareClass, host: Host) -> Report | None:
    """Check that a loaded model keeps its class's promise of precision; None for a backend without a reference.

    A class on CPUs that passed is not measured again with the same model, class, software and kind of CPU: one text
    tells whether it still computes what it did then.

    GateFailed if it does not: the message is the table. If there are no references, raises as :func:`references_for`.
    """
    backend = encoder.backend
    if backend.reference is None:
        return None
    facts: list[object] = []
    if hardware.device == "cpu":
        bounds = hardware.thresholds(backend.reference.bounds)
        engine = [backend.engine, dict(hardware.options), encoder.token_budget, host.threads]
        kernels = files_in(host.cache / "kernels")
        promise = [hardware.precision, hardware.overrides_in_words, asdict(bounds)]
        facts = [backend.fingerprint, hardware.backend, engine, promise, software(), kernels]
        report = _passed_before(noted(host.cache, "passed", facts))
        if report is not None and _still(encoder, report.bounds, references_for(backend.reference.files, host)):
            return report
    report = measure_backend(encoder, hardware, host)
    if report is not None and not report.passed:
        raise GateFailed(f"the accuracy gate failed: {report}")
    if facts and report is not None:
        note(host.cache, "passed", facts, asdict(report))
    return report


def _passed_before(found: Any) -> Report | None:
    """The report of a gate that was passed, as it was noted."""
    if found is None:
        return None
    checks = [_check(**each) for each in found["checks"]]
    rankings = [Agreement(**each) for each in found["rankings"]]
    return Report(**{**found, "bounds": Thresholds(**found["bounds"]), "checks": checks, "rankings": rankings})


def _check(measured: Mapping[str, Any], bounds: Mapping[str, Any], **others: Any) -> Check:
    return Check(measured=Measured(**measured), bounds=Thresholds(**bounds), **others)


def _still(encoder: ChunkEncoder, bounds: Thresholds, references: Vectors) -> bool:
    """Whether a text of the gate has its vector."""
    at = _NAMES.index(KNOWN_GOOD)
    if encoder.backend.dim not in (0, references.shape[1]):
        return False
    return _Gate(encoder, bounds, references.shape[1], float16=False).one(at, references[[at]]).passed


def measure_backend(encoder: ChunkEncoder, hardware: HardwareClass, host: Host) -> Report | None:
    """As :func:`run_gate`, but a figure beyond its bound raises nothing.

    GateFailed if the vectors and the references differ in their number of dimensions.
    """
    backend = encoder.backend
    if backend.reference is None:
        return None
    files = backend.reference.files
    plain, prompted = references_for(files, host), references_for(files, host, prompt=PROMPT)
    if backend.dim not in (0, plain.shape[1]):
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
        checks=_Gate(encoder, bounds, plain.shape[1], float16=hardware.stores_float16).checks(plain, prompted),
        rankings=agreements(encoder, hardware.precision, host),
    )


class _Gate:
    """Encodes the gate's texts like a chunk, in the encoder's batches or in chosen ones.

    If results store the vectors in float16, their distances are measured after that rounding. A model that gives no
    dense vectors is measured by its own output, as rows of `columns`: in fp32, each of their numbers has a bound, too.
    """

    def __init__(self, encoder: ChunkEncoder, bounds: Thresholds, columns: int, *, float16: bool) -> None:
        self._columns = columns
        self._other = encoder.backend.outputs[0] if Output.DENSE not in encoder.backend.outputs else None
        self._exact = bounds.max_abs_error <= _ABSOLUTE
        self._float16 = float16
        self._encoder = encoder
        self._bounds = bounds
        # The largest error of a vector within these bounds; the error of its length can't be larger. A relative error
        # of e turns a vector to a cosine of 1 - e²/2.
        self._raw_error = min(bounds.max_abs_error * math.sqrt(columns), math.sqrt(2 * (1 - bounds.min_cosine)))

    def checks(self, plain: Vectors, prompted: Vectors) -> list[Check]:
        every = range(len(_NAMES))
        prepared = self._prepare(every)
        lengths = prepared.tokens.lengths.tolist()
        largest = max((max(lengths[row] for row in batch) * len(batch) for batch in prepared.batches), default=0)
        together = self._encode(every, prepared)

        order = sorted(every, key=lengths.__getitem__)
        short = [row for row in order if lengths[row] <= _SHORT]
        prompt = self._encoder.backend.own_prompts.get("query", PROMPT)
        prompted_raw = self._encode(short, self._prepare(short, prompt=prompt, normalize=False))

        few = short[:: math.ceil(len(short) / FEW)]
        longer = order[min(len(short), len(order) - 1)]
        padded = few[: max(1, largest // lengths[longer] - 1)]
        alone = self._encode(few, batches=[[at] for at in range(len(few))])
        beside = self._encode([*padded, longer], batches=[[len(padded), *range(len(padded))]])
        reverse = self._encode(few, batches=[range(len(few))[::-1]])
        return [
            self._check("in batches", together, plain),
            self._check("prompt, raw", prompted_raw, prompted[short], normalized=False),
            self._check("alone", alone, plain[few]),
            self._check("beside a longer text", beside, plain[[*padded, longer]]),
            self._check("in another order", reverse, plain[few]),
        ]

    def one(self, row: int, reference: Vectors) -> Check:
        return self._check("known good", self._encode([row]), reference)

    def _prepare(self, rows: Sequence[int], *, prompt: str | None = None, normalize: bool = True) -> Prepared:
        texts = [TEXTS[_NAMES[row]].encode() for row in rows]
        chunk = ChunkInput(first=0, kinds=bytes([RecordKind.TEXT] * len(texts)), texts=texts)
        normalize = normalize and self._other is None
        options = {"prompt": prompt, "normalize": normalize, **self._encoder.own_options}
        return self._encoder.prepare(chunk, options)

    def _encode(
        self, rows: Sequence[int], prepared: Prepared | None = None, batches: Sequence[Sequence[int]] = ()
    ) -> _Encoded:
        prepared = prepared or self._prepare(rows)
        if batches:
            prepared = replace(prepared, batches=[np.array(batch, np.int64) for batch in batches])
        encoded = self._encoder.encode(prepared)
        names = [_NAMES[row] for row in rows]
        vectors = in_rows(encoded.vectors, self._columns)
        return _Encoded(names, vectors, {names[error.row]: error.message for error in encoded.errors})

    def _check(self, name: str, found: _Encoded, expected: Vectors, *, normalized: bool = True) -> Check:
        failures = dict(found.failures)
        if self._other is not None:
            normalized = False
            if self._exact:
                close = np.isclose(found.vectors, expected, _RELATIVE, _ABSOLUTE)
                failures |= {name: _OTHERWISE for name, row in zip(found.names, close, strict=True) if not row.all()}
        elif normalized:
            expected = unit(expected)
        measured = measure(found.vectors, expected)
        if self._float16:  # rounding alone changes lengths by more than a normalised vector may be off
            measured = replace(measure(rounded(found.vectors), expected), length_error=measured.length_error)
        texts = len(found.names)
        return Check(
            name=name,
            texts=texts,
            measured=measured,
            bounds=self._bounds if texts > FEW + 1 else replace(self._bounds, mean_cosine=-1.0),
            length_bound=_UNIT_ERROR if normalized else self._raw_error,
            normalized=normalized,
            worst=found.names[measured.worst],
            failures=failures,
        )


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Vectors of texts, float32, texts × dimensions; and text → why it has none."""

    names: Sequence[str]
    vectors: Vectors
    failures: Mapping[str, str]

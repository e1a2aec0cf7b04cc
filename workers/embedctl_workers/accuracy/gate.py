"""The accuracy gate: compares a backend's vectors with the model's, before a worker takes its first chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
from embedctl_workers.arrays.outputs import side_by_side
from embedctl_workers.arrays.tokens import Found
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
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
#: How far a weight, or a number of a token's vector, may be from the reference in fp32: by this part of it, and by this
#: much.
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
        if report is not None and _still(encoder, report.bounds, host):
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


def _still(encoder: ChunkEncoder, bounds: Thresholds, host: Host) -> bool:
    """Whether a text of the gate has what it had."""
    return all(check.passed for gate in _gates(encoder, bounds, host) for check in gate.of_one())


def measure_backend(encoder: ChunkEncoder, hardware: HardwareClass, host: Host) -> Report | None:
    """As :func:`run_gate`, but a figure beyond its bound raises nothing; raises as :func:`_gates`."""
    backend = encoder.backend
    if backend.reference is None:
        return None
    bounds = hardware.thresholds(backend.reference.bounds)
    gates = _gates(encoder, bounds, host, float16=hardware.stores_float16)
    return Report(
        title=f"model {backend.reference.files.name}, backend {hardware.backend} ({backend.engine}), "
        f"{hardware.precision}, against torch in fp32",
        bounds=bounds,
        overrides=hardware.overrides_in_words,
        checks=[check for gate in gates for check in gate.checks()],
        rankings=agreements(encoder, hardware.precision, host),
    )


def _gates(encoder: ChunkEncoder, bounds: Thresholds, host: Host, *, float16: bool = False) -> list[_Gate]:
    """A gate of what a model gives of texts by itself; and in fp32, another one of the heads beside its dense vectors.

    GateFailed if the vectors and the references differ in their number of dimensions.
    """
    backend = encoder.backend
    assert backend.reference is not None
    files = backend.reference.files
    references = references_for(files, host)
    dimensions = references[Output.DENSE][0].shape[1] if backend.dim else 0
    if backend.dim != dimensions:
        raise GateFailed(
            f"the accuracy gate failed: vectors of model {files.name!r} have {dimensions} dimensions in torch, and "
            f"{backend.dim} here"
        )
    parts = [backend.outputs[:1], backend.outputs[1:] if bounds.max_abs_error <= _ABSOLUTE else ()]
    return [
        _Gate(encoder, bounds, {each: references[each] for each in part}, float16=float16) for part in parts if part
    ]


class _Gate:
    """Encodes the gate's texts like a chunk, in the encoder's batches or in chosen ones, into some outputs at once.

    `expected` holds their references, without a prompt and with one. If results store vectors in float16, their
    distances are measured after that rounding. Of weights and of tokens' vectors, each number has a bound in fp32, and
    no other figure has one.
    """

    def __init__(
        self,
        encoder: ChunkEncoder,
        bounds: Thresholds,
        expected: Mapping[Output, tuple[Found, Found]],
        *,
        float16: bool,
    ) -> None:
        self._expected = expected
        self._exact = bounds.max_abs_error <= _ABSOLUTE
        self._float16 = float16
        self._encoder = encoder
        self._bounds = bounds

    def checks(self) -> list[Check]:
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
            check
            for output in self._expected
            for check in (
                self._check(output, "in batches", together, every),
                self._check(output, "prompt, raw", prompted_raw, short, prompted=True),
                self._check(output, "alone", alone, few),
                self._check(output, "beside a longer text", beside, [*padded, longer]),
                self._check(output, "in another order", reverse, few),
            )
        ]

    def of_one(self) -> list[Check]:
        rows = [_NAMES.index(KNOWN_GOOD)]
        found = self._encode(rows)
        return [self._check(output, "known good", found, rows) for output in self._expected]

    def _prepare(self, rows: Sequence[int], *, prompt: str | None = None, normalize: bool = True) -> Prepared:
        texts = [TEXTS[_NAMES[row]].encode() for row in rows]
        chunk = ChunkInput(first=0, kinds=bytes([RecordKind.TEXT] * len(texts)), texts=texts)
        # The references of tokens' vectors are of length 1.
        options = {"prompt": prompt, "normalize": normalize or Output.DENSE not in self._expected}
        return self._encoder.prepare(chunk, {**options, "vectors": list(self._expected)})

    def _encode(
        self, rows: Sequence[int], prepared: Prepared | None = None, batches: Sequence[Sequence[int]] = ()
    ) -> EncodedChunk:
        prepared = prepared or self._prepare(rows)
        if batches:
            prepared = replace(prepared, batches=[np.array(batch, np.int64) for batch in batches])
        return self._encoder.encode(prepared)

    def _check(
        self, output: Output, name: str, encoded: EncodedChunk, texts: Sequence[int], *, prompted: bool = False
    ) -> Check:
        dense = output is Output.DENSE
        names, references = [_NAMES[row] for row in texts], self._expected[output][prompted][list(texts)]
        normalized = dense and not prompted
        found, expected = side_by_side(
            encoded.vectors if dense else encoded.vectors[:, list(self._expected).index(output)],
            unit(references) if normalized else references,
        )
        failures = {names[error.row]: error.message for error in encoded.errors}
        measured = measure(found, expected)
        if self._float16:  # rounding alone changes lengths by more than a normalised vector may be off
            stored = [rounded(row[np.newaxis])[0] for row in found]
            measured = replace(measure(stored, expected), length_error=measured.length_error)
        # The largest error of a vector within these bounds; the error of its length can't be larger. A relative error
        # of e turns a vector to a cosine of 1 - e²/2.
        bounds, columns = self._bounds, max(map(len, expected))
        raw_error = min(bounds.max_abs_error * math.sqrt(columns), math.sqrt(2 * (1 - bounds.min_cosine)))
        if self._exact and not dense:
            close = [np.allclose(*each, _RELATIVE, _ABSOLUTE) for each in zip(found, expected, strict=True)]
            failures |= {name: _OTHERWISE for name, each in zip(names, close, strict=True) if not each}
            bounds, raw_error = Thresholds(), math.inf
        return Check(
            name=name if output is self._encoder.backend.outputs[0] else f"{output}, {name}",
            texts=len(names),
            measured=measured,
            bounds=bounds if len(names) > FEW + 1 else replace(bounds, mean_cosine=-1.0),
            length_bound=_UNIT_ERROR if normalized else raw_error,
            normalized=normalized,
            worst=names[measured.worst],
            failures=failures,
        )

"""What a worker tells Redis about the chunks that it holds: renewals, results, and chunks that it gives back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from embedctl.queueing.broker import Broker
from embedctl.store import Claim, Completed, Doubts
from embedctl_config import wire
from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable, ChunkFilesUnavailable
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.hardware import HardwareClass
from embedctl_config.outputs import asked_by
from embedctl_config.retry import REDIS, RetryLimit
from embedctl_config.wire import ChunkResult
from embedctl_workers.arrays.outputs import taken_apart
from embedctl_workers.encoding.encoder import EncodedChunk
from embedctl_workers.serving.claimed import ClaimedChunk
from embedctl_workers.serving.in_hand import Held
from embedctl_workers.serving.telemetry import Telemetry

log = logging.getLogger(__name__)

T = TypeVar("T")

#: After this many failures in a row while Redis takes small writes, Redis refuses this one.
_MOST_FAILURES = 8
#: The width of a model that gives no dense vector is taken for this one, BERT's.
_USUAL_WIDTH = 768


class ChunkStore:
    """Tells Redis about held chunks, and waits for a Redis that is away, until `draining` is set.

    It is set when the worker is to stop: then BrokerUnavailable. BrokerRefused: Redis takes other writes, and not this
    one.
    """

    def __init__(
        self, broker: Broker, hardware: HardwareClass, telemetry: Telemetry, draining: threading.Event
    ) -> None:
        self._broker = broker
        self._hardware = hardware
        self._telemetry = telemetry
        self._draining = draining

    def renew(self, held: Held, row: int) -> str:
        """Renew a chunk's lease, and say which row is encoded next; Redis' answer."""
        return self._retried(held, lambda: self._broker.jobs.renew(held.job_id, held.chunk, held.token, row=row))

    def text(self, held: Held, claim: Claim) -> bytes | None:
        """The bytes of a claimed chunk; None if they are gone from outside of Redis.

        WireForeign if they are damaged; a SettingsError if they are where this worker does not look.
        """
        return self._retried(held, lambda: self._broker.chunk_files.get(claim.input))

    def complete(self, claimed: ClaimedChunk, encoded: EncodedChunk) -> None:
        """Store the result of a chunk."""
        held, job = claimed.held, claimed.job
        found = self._result(claimed, encoded)
        payload = wire.encode_result(found)
        jobs = self._broker.jobs
        result = jobs.upload(job, "out", held.chunk, payload)
        failed = [error.row for error in encoded.errors]
        rest = wire.encode_input(claimed.chunk.select(failed)) if failed else b""
        kept = jobs.upload(job, "in", held.chunk, rest)
        fingerprint = claimed.encoder.backend.fingerprint
        began = time.monotonic()
        answer = self._retried(
            held,
            lambda: jobs.complete(
                held.job_id,
                held.chunk,
                held.token,
                result.value(),
                _report(claimed, encoded, found.dim, kept.value() if failed else b""),
                fingerprint=fingerprint,
            ),
        )
        if answer == "ok":
            for each in (result, kept):
                self._retried(held, each.noted)
        self._telemetry.staged(held.model, "store", time.monotonic() - began)
        self._telemetry.answered(
            held.model, answer, len(claimed.chunk) - len(failed), [error.code for error in encoded.errors]
        )
        if answer != "ok":
            log.info("the chunk's result was not needed: %s", answer, extra=held.fields)

    def give_back(
        self,
        held: Held,
        *,
        delay_s: float,
        trouble: str = "",
        doubts: Doubts | None = None,
        others_first_s: float = 0.0,
    ) -> None:
        """End the lease of a chunk that this worker does not complete. If Redis is away, the lease lapses instead.

        It may be taken again after `delay_s`, and by this worker after `others_first_s`. The job's status is to say
        `trouble`. `doubts` are what this worker and earlier owners could not do with the chunk.
        """
        try:
            self._broker.jobs.release(
                held.job_id,
                held.chunk,
                held.token,
                delay_s=delay_s,
                trouble=trouble,
                doubts=doubts,
                others_first_s=others_first_s,
            )
        except BrokerUnavailable as error:
            log.warning("the chunk can't be given back, its lease will lapse: %s", error, extra=held.fields)

    def _result(self, claimed: ClaimedChunk, encoded: EncodedChunk) -> ChunkResult:
        chunk = claimed.chunk
        options, encoder = claimed.job.options, claimed.encoder
        found = taken_apart(
            encoded.vectors,
            asked_by(options),
            encoder.dim_of(options),
            encoder.backend.widths,
            float16=self._hardware.stores_float16,
        )
        return ChunkResult(
            first=chunk.first,
            rows=len(chunk),
            dim=found.dense.shape[1],
            digest=wire.digest_of(claimed.payload),
            fingerprint=job_fingerprint(encoder.backend.fingerprint, options),
            precision=self._hardware.precision,
            bounds=self._hardware.overrides_in_words,
            backend=self._hardware.backend,
            vectors=found.dense.tobytes(),
            dtype=found.dense.dtype.str,
            checksums=chunk.row_checksums(),
            ids=chunk.ids,
            positions=chunk.positions,
            errors=encoded.errors,
            truncations=encoded.truncations,
            kept=chunk.kept,
            tokens=encoded.counts.tolist() if options.get("count_tokens") else None,
            sparse=found.sparse,
            multi=found.multi,
        )

    def _retried(self, held: Held, ask: Callable[[], T]) -> T:
        """Ask until Redis answers. The lease is renewed meanwhile, or lapses, which does no harm."""
        refusals, limit = 0, RetryLimit()

        def failed(error: BrokerUnavailable, pause_s: float) -> None:
            nonlocal refusals
            if isinstance(error, BrokerRefused):
                raise error
            log.warning("held back: %s", error, extra=held.fields)
            if isinstance(error, ChunkFilesUnavailable):
                try:
                    limit(error, pause_s)
                except ChunkFilesUnavailable:
                    raise BrokerRefused(str(error)) from error
                return
            refusals = refusals + 1 if self._takes_writes(held) and not isinstance(error, BrokerFull) else 0
            if refusals >= _MOST_FAILURES:
                raise BrokerRefused(f"Redis did not take it {refusals} times, and takes others: {error}") from error

        return REDIS.call(ask, BrokerUnavailable, failed=failed, sleep=self._draining.wait)

    def _takes_writes(self, held: Held) -> bool:
        """Whether Redis takes a small write for this chunk: then the larger one is itself to blame."""
        try:
            self._broker.jobs.renew(held.job_id, held.chunk, held.token)
        except BrokerUnavailable:
            return False
        return True


def _report(claimed: ClaimedChunk, encoded: EncodedChunk, dim: int, failed_input: bytes) -> Completed:
    failed = len(encoded.errors)
    return Completed(
        done=len(claimed.chunk) - failed,
        failed=failed,
        truncated=len(encoded.truncations),
        tokens=encoded.tokens,
        work=_work(claimed, encoded),
        dim=dim,
        failed_input=failed_input,
    )


def _work(claimed: ClaimedChunk, encoded: EncodedChunk) -> int:
    """The work of a chunk, in tokens of a short text. A layer of width h takes 24 h² operations for each token, and 4 h
    for each token that this one attends to (Kaplan et al. 2020, Scaling Laws for Neural Language Models, table 1)."""
    backend = claimed.encoder.backend
    lengths = encoded.counts.astype("f8")
    work = float((lengths * (1 + lengths.clip(max=backend.max_tokens) / (6 * (backend.dim or _USUAL_WIDTH)))).sum())
    # Equal texts are encoded once.
    return round(work * encoded.tokens / max(1.0, float(lengths.sum())))

"""What a worker does with a ticket: claim, prepare, encode, complete."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from embedctl.broker import Broker
from embedctl.store import ClaimAnswer, Completed, JobStatus
from embedctl_config import wire
from embedctl_config.errors import BrokerUnavailable, JobError
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.hardware import HardwareClass
from embedctl_config.wire import ChunkInput, ChunkResult
from embedctl_workers.encoder import ChunkEncoder, EncodedChunk, Prepared, Stopped
from embedctl_workers.inhand import Held, InHand

log = logging.getLogger(__name__)

#: A chunk whose task failed for a reason of its own (not of a record) is offered again after this long.
_RETRY_DELAY_S = 10.0
_LONGEST_PAUSE_S = 5.0
#: Weight of the newest chunk in the running rate.
_RATE_WEIGHT = 0.2


class ChunkRunner:
    """Turns tickets into stored vectors. One thread encodes while others claim and prepare.

    Args:
        encoders: by model name.
        instance: this worker process.
    """

    def __init__(
        self, broker: Broker, hardware: HardwareClass, encoders: Mapping[str, ChunkEncoder], instance: str
    ) -> None:
        self._broker = broker
        self._hardware = hardware
        self._encoders = encoders
        self._instance = instance
        self._device = threading.Lock()
        self.in_hand = InHand()
        self.draining = threading.Event()
        self.progressed_ms = 0
        self.tokens_per_s: dict[str, float] = dict.fromkeys(encoders, 0.0)
        # A job's options never change, and its chunks come one after the other.
        self._job = lru_cache(maxsize=256)(broker.jobs.status)

    def run(self, model: str, job_id: str, chunk: int, version: int) -> None:
        """Do what a ticket says. Never raises: whatever goes wrong, the reaper sends another ticket."""
        if version > wire.VERSION:
            log.warning(
                "job %s chunk %d: its ticket is of version %d, mine is %d",
                job_id,
                chunk,
                version,
                wire.VERSION,
            )
            return
        held = Held(job_id, chunk, secrets.token_hex(8))
        try:
            self._run(model, held)
        except Stopped:
            log.info("job %s chunk %d: no longer wanted", job_id, chunk)
        except BrokerUnavailable as error:
            log.warning("job %s chunk %d: %s", job_id, chunk, error)
        except JobError as error:
            log.info("job %s chunk %d: %s", job_id, chunk, error)
        except Exception:
            log.exception("job %s chunk %d: failed, and will be offered again", job_id, chunk)
            self._give_back(held, delay_s=_RETRY_DELAY_S)
        finally:
            self.in_hand.drop(held)

    def _run(self, model: str, held: Held) -> None:
        encoder = self._encoders[model]
        job = self._job(held.job_id)
        if job.precision != self._hardware.precision:
            # A host whose class of this name is configured otherwise; the reaper offers the chunk to the others.
            log.warning("job %s wants %s, and this worker offers %s", job.id, job.precision, self._hardware.precision)
            return
        fingerprint = encoder.backend.fingerprint
        claim = self._broker.jobs.claim(
            held.job_id, held.chunk, token=held.token, instance=self._instance, fingerprint=fingerprint
        )
        if claim.answer is not ClaimAnswer.OK:
            log.log(
                logging.WARNING if claim.answer in (ClaimAnswer.MISMATCH, ClaimAnswer.LOST) else logging.DEBUG,
                "job %s chunk %d: %s %s",
                held.job_id,
                held.chunk,
                claim.answer,
                claim.fingerprint,
            )
            return
        self.in_hand.take(held)
        chunk = wire.decode_input(claim.input)
        held.moving_since = time.monotonic()  # a tokeniser may hang as well
        try:
            prepared = encoder.prepare(chunk, job.options)
        finally:
            held.moving_since = None
        with self._device:
            if self.draining.is_set():
                self._give_back(held, delay_s=0)
                self._broker.tickets.send(job.queue, held.job_id, [held.chunk])
                return
            encoded = self._encode(model, encoder, prepared, held)
        self._complete(job, held, claim.input, chunk, encoded, fingerprint)

    def _encode(self, model: str, encoder: ChunkEncoder, prepared: Prepared, held: Held) -> EncodedChunk:
        def on_batch(tokens: int) -> None:
            held.moving_since = time.monotonic()
            self.progressed_ms = time.time_ns() // 1_000_000

        started = held.moving_since = time.monotonic()
        try:
            encoded = encoder.encode(prepared, on_batch=on_batch, wanted=lambda: not held.unwanted.is_set())
        finally:
            held.moving_since = None
        rate = encoded.tokens / max(1e-6, time.monotonic() - started)
        before = self.tokens_per_s[model]
        self.tokens_per_s[model] = before + _RATE_WEIGHT * (rate - before) if before else rate
        return encoded

    def _complete(
        self,
        job: JobStatus,
        held: Held,
        input_bytes: bytes,
        chunk: ChunkInput,
        encoded: EncodedChunk,
        fingerprint: str,
    ) -> None:
        failed = [error.row for error in encoded.errors]
        payload = wire.encode_result(
            ChunkResult(
                first=chunk.first,
                rows=len(chunk),
                dim=encoded.vectors.shape[1],
                digest=wire.digest_of(input_bytes),
                fingerprint=job_fingerprint(fingerprint, job.options),
                precision=self._hardware.precision,
                backend=self._hardware.backend,
                vectors=encoded.vectors.astype("<f4", copy=False).tobytes(),
                checksums=chunk.row_checksums(),
                ids=chunk.ids,
                positions=chunk.positions,
                errors=encoded.errors,
                truncations=encoded.truncations,
            )
        )
        report = Completed(
            done=len(chunk) - len(failed),
            failed=len(failed),
            truncated=len(encoded.truncations),
            tokens=encoded.tokens,
            dim=encoded.vectors.shape[1],
            failed_input=wire.encode_input(chunk.select(failed)) if failed else b"",
        )
        answer = self._patiently_complete(held, payload, report, fingerprint)
        if answer == "ok":
            self._broker.send_issued(held.job_id, job.queue)
        else:
            log.info("job %s chunk %d: its result was not needed: %s", held.job_id, held.chunk, answer)

    def _patiently_complete(self, held: Held, payload: bytes, report: Completed, fingerprint: str) -> Any:
        """Hold on to a result until Redis takes it; the lease is renewed meanwhile, or lapses and does no harm."""
        pause = 0.1
        while True:
            try:
                return self._broker.jobs.complete(
                    held.job_id, held.chunk, held.token, payload, report, fingerprint=fingerprint
                )
            except BrokerUnavailable as error:
                log.warning("job %s chunk %d: result held back: %s", held.job_id, held.chunk, error)
                if self.draining.wait(pause):
                    raise
                pause = min(_LONGEST_PAUSE_S, pause * 2)

    def _give_back(self, held: Held, *, delay_s: float) -> None:
        try:
            self._broker.jobs.release(held.job_id, held.chunk, held.token, delay_s=delay_s)
        except BrokerUnavailable as error:
            log.warning(
                "job %s chunk %d: can't be given back, its lease will lapse: %s",
                held.job_id,
                held.chunk,
                error,
            )

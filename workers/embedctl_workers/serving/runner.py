"""What a worker does with a ticket: claim, prepare, encode, complete."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NoReturn

from embedctl.broker import Broker
from embedctl.store import ClaimAnswer, Completed, Doubts, JobStatus
from embedctl.tickets import Ticket
from embedctl_config import wire
from embedctl_config.errors import (
    BrokerFull,
    BrokerRefused,
    BrokerUnavailable,
    DeviceLost,
    JobError,
    WireError,
    WorkerSick,
)
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.hardware import HardwareClass
from embedctl_config.wire import ChunkInput, ChunkResult
from embedctl_workers.encoding.careful import encode_carefully
from embedctl_workers.encoding.encoder import NOT_OF_A_RECORD, ChunkEncoder, EncodedChunk, Stopped
from embedctl_workers.encoding.prepared import Prepared
from embedctl_workers.redaction import first_line, kind_and_place, without_message
from embedctl_workers.serving import second_word
from embedctl_workers.serving.in_hand import Held, InHand
from embedctl_workers.serving.isolation import Room
from embedctl_workers.serving.speed import Speed
from embedctl_workers.serving.telemetry import Telemetry

log = logging.getLogger(__name__)

#: A chunk whose task failed for a reason of its own (not of a record's) is offered again after this, then ever later.
_RETRY_DELAY_S = 10.0
_LONGEST_RETRY_DELAY_S = 30 * 60.0
_LONGEST_PAUSE_S = 5.0
#: Should the ticket of a chunk that is left to another worker lie where nobody takes it, another is sent after this.
_LEFT_DELAY_S = 5.0
#: A worker that gave back so many chunks in a row, for more than half of their rows, rests after each: it finds out
#: faster that it can't encode a chunk than others encode one, and would draw the whole job to itself.
_UNSURE_AFTER = 2
_LONGEST_REST_S = 5.0
#: What Redis did not take so often, while it took what is small, it never will.
_MOST_FAILURES = 8


class ChunkRunner:
    """Turns tickets into stored vectors. One thread encodes while others claim and prepare.

    Args:
        encoders: by model name.
        instance: this worker process.
        telemetry: is told of what becomes of chunks.
    """

    def __init__(
        self,
        broker: Broker,
        hardware: HardwareClass,
        encoders: Mapping[str, ChunkEncoder],
        instance: str,
        telemetry: Telemetry,
    ) -> None:
        self._broker = broker
        self._hardware = hardware
        self._encoders = encoders
        self._instance = instance
        self._telemetry = telemetry
        self._device = threading.Lock()
        self._encoded_at = 0.0
        self._room = Room()
        self._returned: deque[Ticket] = deque()
        self.in_hand = InHand()
        self.draining = threading.Event()
        self.progressed_ms = 0
        #: Why this worker takes nothing any more, once it has found out that it can't encode.
        self.sick: WorkerSick | None = None
        #: Ends this process in good order, with a status; called once it is sick.
        self.leave: Callable[[int], None] = lambda status: None
        self._unsure = 0
        self._passed = second_word.Passed()
        self.speed: dict[str, Speed] = dict.fromkeys(encoders, Speed())
        # A job's options never change, and its chunks come one after the other.
        self._job = lru_cache(maxsize=256)(broker.jobs.status)

    def run(self, model: str, ticket: Ticket) -> None:
        """Do what a ticket says. Never raises: whatever goes wrong, there will be another ticket."""
        held = Held(ticket.job_id, ticket.chunk, secrets.token_hex(8), model)
        version = ticket.facts.get("version")
        if isinstance(version, int) and version > wire.VERSION:
            log.debug("its ticket is of a newer version", extra=held.fields)
            self._returned.append(ticket)
            return
        with self._room:
            if self.draining.is_set():  # perhaps it was told so while a suspect chunk had the room
                self._returned.append(ticket)
                return
            try:
                self._run(held, ticket)
            except WorkerSick as error:
                self._fall_sick(error, held, ticket)
            except Stopped:
                log.info("the chunk is no longer wanted", extra=held.fields)
            except BrokerRefused as error:
                # Held back, it would be refused again, for ever; its lease would be renewed meanwhile.
                log.error("the chunk is given back: %s", error, extra=held.fields)  # noqa: TRY400  (Redis is to blame, not a line of ours)
                self._telemetry.failed(model)
                self._give_back(held, delay_s=_retry_delay_s(held), trouble=first_line(error))
            except BrokerUnavailable as error:
                log.warning("the chunk has to wait: %s", error, extra=held.fields)
                self._returned.append(ticket)
            except _NotForMe as error:
                log.warning("the chunk is not for this worker: %s", error, extra=held.fields)
                self._returned.append(ticket)
            except JobError as error:
                log.info("the chunk is not wanted: %s", error, extra=held.fields)
            except DeviceLost as error:
                self._end(error, held)
            except Exception as error:
                log.error(  # noqa: TRY400  (its message may quote a text)
                    "the chunk failed (%s), and will be offered again",
                    type(error).__name__,
                    exc_info=without_message(error),
                    extra=held.fields,
                )
                self._telemetry.failed(model)
                self._offer_again(error, held, ticket)
            finally:
                self.in_hand.drop(held)
        if held.rest_s:
            self.draining.wait(held.rest_s)

    def return_tickets(self) -> None:
        """Send on the tickets that could not be dealt with here: a newer worker, or a better moment, may do it.

        Called at each heartbeat and no sooner, so that a ticket which nobody can deal with does not run in circles.

        Raises:
            BrokerUnavailable: Redis can't be reached; they are kept until the next call.
        """
        tickets = [self._returned.popleft() for _ in range(len(self._returned))]
        try:
            self._broker.tickets.forward(tickets)
        except BrokerUnavailable:
            self._returned.extend(tickets)
            raise

    def _run(self, held: Held, ticket: Ticket) -> None:
        encoder = self._encoders[held.model]
        job = self._job(held.job_id)
        if job.precision != self._hardware.precision:
            # A host whose class of this name is configured otherwise.
            raise _NotForMe(f"the job wants {job.precision}, and this worker offers {self._hardware.precision}")
        others = partial(self._others, job.queue)
        rest_s = self._passed.rest_s(held.job_id, held.chunk, others)
        if rest_s is not None:
            held.rest_s = rest_s
            self._broker.tickets.forward([ticket])
            return
        fingerprint = encoder.backend.fingerprint
        waited_s = self._age_s(ticket)
        claim = self._broker.jobs.claim(
            held.job_id, held.chunk, token=held.token, instance=self._instance, fingerprint=fingerprint
        )
        self._telemetry.claimed(held.model, claim, waited_s)
        if claim.answer is not ClaimAnswer.OK:
            log.log(
                logging.WARNING if claim.answer in (ClaimAnswer.MISMATCH, ClaimAnswer.LOST) else logging.DEBUG,
                "the chunk can't be claimed: %s",
                f"{claim.answer} {claim.fingerprint}".rstrip(),
                extra=held.fields,
            )
            return
        held.attempt, held.doubts = claim.attempt, claim.doubts
        self.in_hand.take(held)
        try:
            chunk = wire.decode_input(claim.input)
        except WireError as error:  # a newer format too: in a job of my version it can only be damage
            self._tell_unreadable(job, held, error)
            return
        if claim.given_up is None and not (claim.doubts and claim.doubts.is_suspect):
            encoded = self._encode_beside_others(encoder, chunk, job, held)
        else:
            encoded = self._encode_alone(encoder, chunk, job, held, claim.given_up or ())
        if encoded is None or self.sick is not None:  # the other thread may have found out what these vectors are worth
            self._give_back(held, delay_s=0)
            self._broker.tickets.send(job.queue, held.job_id, [held.chunk], version=job.version)
        elif second_word.counts(encoded, claim.doubts, self._instance, others):
            self._unsure = 0
            self._telemetry.encoded(held.model, encoded.tokens, encoded.positions)
            self._complete(job, held, claim.input, chunk, encoded, fingerprint)
        else:
            self._ask_another(job, held, encoded)

    def _offer_again(self, error: Exception, held: Held, ticket: Ticket) -> None:
        """Give back a chunk with which something went wrong that is no record's fault; perhaps it is the worker's."""
        try:
            with self._device:
                self._encoders[held.model].check_worker()
        except WorkerSick as sick:
            self._fall_sick(sick, held, ticket)
        except DeviceLost as lost:
            self._end(lost, held)
        else:
            self._give_back(held, delay_s=_retry_delay_s(held), trouble=kind_and_place(error))

    def _end(self, error: DeviceLost, held: Held) -> NoReturn:
        """Another process of this place may have the device again. What this one holds is suspect: each of its records
        is then tried alone."""
        log.critical("%s: ending this process", error, extra=held.fields)
        logging.shutdown()
        os._exit(error.exit_code)

    def _age_s(self, ticket: Ticket) -> float | None:
        """How long ago a ticket was first sent, in seconds; None where it does not say."""
        sent_ms, now_ms = ticket.facts.get("sent_ms"), self._broker.connection.about_now_ms()
        # Anything may stand in a ticket, and clocks are only about the same.
        return max(0, now_ms - sent_ms) / 1000 if type(sent_ms) is int and 0 < sent_ms < 2 * now_ms else None

    def _encode_beside_others(
        self, encoder: ChunkEncoder, chunk: ChunkInput, job: JobStatus, held: Held
    ) -> EncodedChunk | None:
        """Prepare a chunk while another one is encoded; None if the worker stops before its turn comes."""
        try:
            prepared = self._prepare(encoder, chunk, job, held)
            return self._encode(encoder, prepared, held)
        except _Draining:
            return None
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:
            log.warning(
                "the chunk failed as a whole (%s): encoding it record by record",
                type(error).__name__,
                exc_info=without_message(error),
                extra=held.fields,
            )
            self._telemetry.failed(held.model)
        try:
            return self._encode_row_by_row(encoder, chunk, job, held)
        except _Draining:
            return None

    def _prepare(self, encoder: ChunkEncoder, chunk: ChunkInput, job: JobStatus, held: Held) -> Prepared:
        began = held.moving_since = time.monotonic()  # a tokeniser may hang as well
        try:
            prepared = encoder.prepare(chunk, job.options, about=held.fields)
        finally:
            held.moving_since = None
        self._telemetry.staged(held.model, "tokenise", time.monotonic() - began)
        return prepared

    def _encode_row_by_row(self, encoder: ChunkEncoder, chunk: ChunkInput, job: JobStatus, held: Held) -> EncodedChunk:
        """Encode a chunk that something failed on which is no row's alone: none of it is to fail for ever."""

        @contextmanager
        def turn() -> Iterator[None]:
            held.moving_since = None  # others may have the device for long
            with self._device:
                if self.draining.is_set():
                    raise _Draining
                held.moving_since = time.monotonic()
                yield

        def announce(row: int) -> None:
            if held.unwanted.is_set():
                raise Stopped
            held.moving_since = time.monotonic()

        try:
            return encode_carefully(
                encoder,
                chunk,
                job.options,
                given_up=(),
                announce=announce,
                on_batch=lambda tokens: self._progress(held),
                turn=turn,
                about=held.fields,
            )
        finally:
            held.moving_since = None

    def _encode_alone(
        self, encoder: ChunkEncoder, chunk: ChunkInput, job: JobStatus, held: Held, given_up: Collection[int]
    ) -> EncodedChunk | None:
        """Encode a suspect chunk with nothing else in this process; None if that is not to be had, or it stops."""
        if not self._room.clear():
            return None
        log.warning("workers died or fell sick over the chunk: encoding it alone, record by record", extra=held.fields)
        doubts = held.doubts or Doubts()

        def announce(row: int) -> None:
            if held.unwanted.is_set():
                raise Stopped
            if self.draining.is_set() and row >= 0:
                raise _Draining
            held.moving_since = None
            renew = partial(self._broker.jobs.renew, held.job_id, held.chunk, held.token, row=row)
            if self._patiently(held, renew) != "ok":
                raise Stopped
            held.row = row if doubts.is_suspect and row >= 0 else None  # else nothing was checked before it
            held.moving_since = time.monotonic()

        def on_batch(tokens: int) -> None:
            if held.unwanted.is_set():
                raise Stopped
            self._progress(held)

        try:
            return encode_carefully(
                encoder,
                chunk,
                job.options,
                given_up=given_up,
                poisonous=doubts.poisonous,
                # First: a worker that falls sick after so many rows, whichever they are, names another then.
                first=doubts.named,
                check=encoder.check_worker if doubts.is_suspect else lambda: None,
                announce=announce,
                on_batch=on_batch,
                about=held.fields,
            )
        except _Draining:
            return None
        finally:
            held.moving_since = None

    def _encode(self, encoder: ChunkEncoder, prepared: Prepared, held: Held) -> EncodedChunk:
        began = batch_began = 0.0

        @contextmanager
        def turn() -> Iterator[None]:
            nonlocal began, batch_began
            with self._device:
                if not began:
                    if self.draining.is_set():
                        raise _Draining
                    began = batch_began = held.moving_since = time.monotonic()
                yield

        def on_batch(tokens: int) -> None:
            nonlocal batch_began
            before, batch_began = batch_began, time.monotonic()
            self._telemetry.batched(held.model, batch_began - before)
            self._progress(held)

        try:
            encoded = encoder.encode(prepared, on_batch=on_batch, wanted=lambda: not held.unwanted.is_set(), turn=turn)
        finally:
            held.moving_since = None
        now = time.monotonic()
        # The last batches of the chunk before may still have been under way when this one began.
        seconds = now - max(began, self._encoded_at)
        self._encoded_at = now
        self._telemetry.staged(held.model, "encode", now - began)
        self.speed[held.model] = self.speed[held.model].after(
            rows=prepared.rows, tokens=encoded.tokens, positions=encoded.positions, seconds=seconds
        )
        return encoded

    def _progress(self, held: Held) -> None:
        held.moving_since = time.monotonic()
        self.progressed_ms = self._broker.connection.about_now_ms()

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
        result = ChunkResult(
            first=chunk.first,
            rows=len(chunk),
            dim=encoded.vectors.shape[1],
            digest=wire.digest_of(input_bytes),
            fingerprint=job_fingerprint(fingerprint, job.options),
            precision=self._hardware.precision,
            bounds=self._hardware.overrides_in_words,
            backend=self._hardware.backend,
            vectors=encoded.vectors.astype("<f4", copy=False).tobytes(),
            checksums=chunk.row_checksums(),
            ids=chunk.ids,
            positions=chunk.positions,
            errors=encoded.errors,
            truncations=encoded.truncations,
        )
        payload = wire.encode_result(result, job.version)
        report = Completed(
            done=len(chunk) - len(failed),
            failed=len(failed),
            truncated=len(encoded.truncations),
            tokens=encoded.tokens,
            dim=encoded.vectors.shape[1],
            failed_input=wire.encode_input(chunk.select(failed), job.version) if failed else b"",
        )
        began = time.monotonic()
        answer = self._patiently(
            held,
            lambda: self._broker.jobs.complete(
                held.job_id, held.chunk, held.token, payload, report, fingerprint=fingerprint
            ),
        )
        self._telemetry.staged(held.model, "store", time.monotonic() - began)
        self._telemetry.answered(held.model, answer, report.done, [error.code for error in encoded.errors])
        if answer == "ok":
            self._broker.send_issued(job)
        else:
            log.info("the chunk's result was not needed: %s", answer, extra=held.fields)

    def _patiently(self, held: Held, ask: Callable[[], str]) -> str:
        """Hold on to what was done until Redis takes it; the lease is renewed meanwhile, or lapses and does no harm."""
        pause, failures = 0.1, 0
        while True:
            try:
                return ask()
            except BrokerRefused:
                raise
            except BrokerUnavailable as error:
                log.warning("held back: %s", error, extra=held.fields)
                failures = failures + 1 if self._takes_writes(held) and not isinstance(error, BrokerFull) else 0
                if failures >= _MOST_FAILURES:
                    raise BrokerRefused(f"Redis did not take it {failures} times, and takes others: {error}") from error
                if self.draining.wait(pause):
                    raise
                pause = min(_LONGEST_PAUSE_S, pause * 2)

    def _takes_writes(self, held: Held) -> bool:
        """Whether Redis does what is asked of this job, so that what it does not take is at fault itself."""
        try:
            self._broker.jobs.renew(held.job_id, held.chunk, held.token)
        except BrokerUnavailable:
            return False
        return True

    def _others(self, queue: str) -> bool:
        """Whether other workers take this queue's tickets."""
        return self._broker.workers.count(queue) > 1

    def _ask_another(self, job: JobStatus, held: Held, encoded: EncodedChunk) -> None:
        """Give a chunk back whose failed rows nobody else has tried."""
        log.warning(
            "%d records failed here, twice: another worker is to try them before they count as failed",
            len(encoded.doubtful),
            extra=held.fields,
        )
        if 2 * len(encoded.doubtful) > len(encoded.vectors):
            self._unsure += 1
            if self._unsure > _UNSURE_AFTER:
                held.rest_s = min(_LONGEST_REST_S, 2.0 ** (self._unsure - _UNSURE_AFTER - 1))
        self._leave_to_another(job, held, (held.doubts or Doubts()).with_rows(self._instance, encoded.doubtful))

    def _leave_to_another(self, job: JobStatus, held: Held, doubts: Doubts, trouble: str = "") -> None:
        self._passed.leave(held.job_id, held.chunk)
        delay_s = min(_LEFT_DELAY_S, self._broker.settings.reissue_s)
        self._give_back(held, delay_s=delay_s, trouble=trouble, doubts=doubts)
        # At once: a worker that waits for a ticket at this moment is another.
        self._broker.tickets.send(job.queue, held.job_id, [held.chunk], version=job.version)

    def _tell_unreadable(self, job: JobStatus, held: Held, error: WireError) -> None:
        """The input of a chunk can't be read, here: it is dropped if that is not this worker's fault."""
        log.error("the chunk's input is damaged: %s", error, extra=held.fields)
        if second_word.counts_as_unreadable(held.doubts):
            self._broker.jobs.drop_input(held.job_id, held.chunk)
            self._give_back(held, delay_s=0, trouble=f"its input was damaged in Redis: {first_line(error)}")
        else:
            trouble = f"worker {self._name} can't read its input: {first_line(error)}"
            doubts = (held.doubts or Doubts()).with_unreadable(self._instance)
            self._leave_to_another(job, held, doubts, trouble)

    def _fall_sick(self, error: WorkerSick, held: Held, ticket: Ticket) -> None:
        """Take nothing any more, give back what is held without blaming it, and have this process end."""
        log.critical("%s: ending this process", error, extra=held.fields)
        self.sick = error
        self.draining.set()
        self._telemetry.failed(held.model)
        # Perhaps it is the chunk: a record may leave a backend of no use.
        doubts = (held.doubts or Doubts()).with_sick(self._instance, held.row)
        self._give_back(held, delay_s=0, trouble=f"worker {self._name}: {first_line(error)}", doubts=doubts)
        self._returned.append(ticket)
        self.leave(error.exit_code)

    @property
    def _name(self) -> str:
        return self._instance.rpartition("/")[0] or self._instance

    def _give_back(self, held: Held, *, delay_s: float, trouble: str = "", doubts: Doubts | None = None) -> None:
        try:
            self._broker.jobs.release(
                held.job_id, held.chunk, held.token, delay_s=delay_s, trouble=trouble, doubts=doubts
            )
        except BrokerUnavailable as error:
            log.warning("the chunk can't be given back, its lease will lapse: %s", error, extra=held.fields)


def _retry_delay_s(held: Held) -> float:
    """After which time a chunk that was given up for a reason of its own is offered again: ever later."""
    return min(_LONGEST_RETRY_DELAY_S, _RETRY_DELAY_S * (1 << min(max(0, held.attempt - 1), 10)))


class _NotForMe(Exception):
    """Raised for a ticket that another worker of its queue may deal with."""


class _Draining(Stopped):
    """Raised before a chunk, or between two records of a suspect one, when the worker is to stop."""

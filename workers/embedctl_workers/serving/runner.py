"""What a worker does with a ticket: claim the chunk, encode it, store its result, or give it back."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NoReturn

from embedctl.queueing.broker import Broker
from embedctl.queueing.tickets import Ticket
from embedctl.store import Claim, ClaimAnswer, Claimant, Doubts, JobStatus
from embedctl.store.queues import QueuedTicket
from embedctl_config import wire
from embedctl_config.errors import (
    BrokerRefused,
    BrokerUnavailable,
    DeviceLost,
    JobError,
    NotPermitted,
    SettingsError,
    WireError,
    WireForeign,
    WorkerSick,
)
from embedctl_config.hardware import HardwareClass
from embedctl_config.retry import Policy, Streak
from embedctl_workers.backends.base import Backend
from embedctl_workers.encoding.device_use import Stopped
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from embedctl_workers.redaction import first_line, redacted, redacted_exc_info
from embedctl_workers.serving import second_word
from embedctl_workers.serving.chunk_encoding import ChunkEncoding, Share, SharedDevice
from embedctl_workers.serving.chunk_store import ChunkStore
from embedctl_workers.serving.claimed import ClaimedChunk
from embedctl_workers.serving.gathering import Candidate, Gathering, is_small, may_be_joined
from embedctl_workers.serving.in_hand import Held, InHand
from embedctl_workers.serving.isolation import Isolation
from embedctl_workers.serving.known_jobs import KnownJobs
from embedctl_workers.serving.telemetry import Telemetry

log = logging.getLogger(__name__)

#: A chunk whose task failed, and not because of a record, is offered again after this back-off.
_OFFERED_AGAIN = Policy(10.0, 30 * 60.0)
#: A chunk that is left to another worker gets another ticket after this, in case the first one is not taken.
_LEFT_DELAY_S = 5.0


class ChunkRunner:
    """Turns tickets into stored vectors. One thread encodes while others claim and prepare.

    Encoders are by model name.
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
        self.instance = instance  #: this worker process
        self._telemetry = telemetry
        self._returned: deque[Ticket] = deque()
        self._doubted = second_word.DoubtedChunks()
        self._unsure = Streak()
        self._isolation = Isolation()
        self._gathering = Gathering(broker)
        self.in_hand = InHand()  #: the chunks that this worker holds
        self.draining = threading.Event()  #: set when the worker is to stop
        self.hurrying = threading.Event()  #: set when it is to stop without finishing the chunk that it is encoding
        self.sick: WorkerSick | None = None  #: why this worker takes no more chunks; None while it is well
        #: ends this process in good order, with an exit status; called once the worker is sick
        self.leave: Callable[[int], None] = lambda status: None
        self._store = ChunkStore(broker, hardware, telemetry, self.draining)
        device = SharedDevice(self.in_hand, telemetry, self.draining, self.hurrying, broker.connection.about_now_ms)
        self._encoding = ChunkEncoding(encoders, self._store, device, self._isolation)
        self.speed = self._encoding.speed  #: by model
        self._jobs = KnownJobs(broker.jobs)
        # Once a job has a claimed chunk, its fingerprint is pinned, and no later answer changes anything.
        self._is_kept_apart = lru_cache(maxsize=256)(self._has_other_files)

    @property
    def backends(self) -> list[Backend]:
        return [each.backend for each in self._encoders.values()]

    def warm_up(self) -> None:
        self._encoding.warm_up(self.backends)

    def run(self, model: str, ticket: Ticket) -> None:
        """Do what a ticket says. Never raises: whatever goes wrong, there will be another ticket."""
        held = Held(ticket.job_id, ticket.chunk, secrets.token_hex(8), model)
        if (version := ticket.facts.get("version")) != wire.VERSION:
            log.warning(
                "the job is left alone: its ticket is of version %s, and this worker handles version %s",
                version,
                wire.VERSION,
                extra=held.fields,
            )
            return
        with self._isolation:
            if self.draining.is_set():  # perhaps since a suspect chunk was isolated
                self._returned.append(ticket)
                return
            joined: list[_Joined] = []
            over: list[_Over] = []
            self._safely(held, ticket, lambda: self._run(held, ticket, joined, over))
            for each in joined:
                self._safely(
                    each.claimed.held, each.ticket, partial(self._finish, each.claimed, each.ticket, over, each.share)
                )
            self._send_what_follows(over)
        if rest_s := max(each.rest_s for each in (held, *(other.claimed.held for other in joined))):
            self.draining.wait(rest_s)

    def return_tickets(self) -> None:
        """Send on the tickets that this worker could not handle: another one may, or this one at a better time.

        Called at each heartbeat and no sooner, so that a ticket which no worker can handle does not run in circles. If
        Redis can't be reached (BrokerUnavailable), the tickets are kept until the next call.
        """
        tickets = [self._returned.popleft() for _ in range(len(self._returned))]
        try:
            self._broker.tickets.forward(tickets)
        except BrokerUnavailable:
            self._returned.extend(tickets)
            raise

    def _safely(self, held: Held, ticket: Ticket, work: Callable[[], None]) -> None:
        """Do the work of a ticket; whatever is raised, see to it that there will be another one."""
        try:
            work()
        except WorkerSick as error:
            self._fall_sick(error, held, ticket)
        except Stopped:
            log.info("the chunk is no longer wanted", extra=held.fields)
        except (BrokerRefused, SettingsError) as error:
            # Redis would refuse it again each time, and its lease would be renewed meanwhile, without end.
            log.error("the chunk is given back: %s", error, extra=held.fields)  # noqa: TRY400  (Redis or this worker's settings are to blame, not this code)
            self._telemetry.failed(held.model)
            by = f"worker {self.name}: " if isinstance(error, SettingsError) else ""
            self._store.give_back(held, delay_s=_OFFERED_AGAIN.pause_s(held.attempt), trouble=by + first_line(error))
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
                exc_info=redacted_exc_info(error),
                extra=held.fields,
            )
            self._telemetry.failed(held.model)
            self._offer_again(error, held, ticket)
        finally:
            self.in_hand.drop(held)

    def _send_what_follows(self, over: list[_Over]) -> None:
        """Send the tickets that have room because others are over. If that fails, those come again and find it so."""
        if not over:
            return
        try:
            self._broker.send_issued_over([(job, ticket.chunk) for job, ticket in over])
        except Exception as error:
            log.warning(  # (its message may quote a text)
                "the tickets that follow have to wait (%s)", type(error).__name__, exc_info=redacted_exc_info(error)
            )
            self._returned.extend(ticket for _, ticket in over)

    def _run(self, held: Held, ticket: Ticket, joined: list[_Joined], over: list[_Over]) -> None:
        """Do what a ticket says. `joined` gets chunks claimed with its own, `over` the ticket if its chunk ends."""
        rest_s = self._doubted.pass_on(held.job_id, held.chunk, partial(self._others, ticket.queue))
        if rest_s is not None:
            held.rest_s = rest_s
            self._broker.tickets.forward([ticket])
            return
        job, claim = self._claim(held)
        claimed = self._read(held, job, ticket, claim)
        if claimed is None:
            return
        share = None
        # A worker that handles one ticket and has room for another would have it, if one waited in the queue.
        if is_small(claimed) and (self._hardware.prefetch == 1 or self._isolation.has_others()):
            self._encoding.wait_for_device()  # more chunks come meanwhile
            if not self.draining.is_set():
                self._gather(claimed, joined)
        if joined:
            share, *shares = self._encoding.encode_together([claimed, *(each.claimed for each in joined)])
            for each, its_share in zip(joined, shares, strict=True):
                each.share = its_share
        self._finish(claimed, ticket, over, share)

    def _claim(self, held: Held) -> tuple[JobStatus, Claim]:
        """Claim a chunk, with the facts of a job that is not known; _NotForMe if another worker may take it."""
        by = self._claimant(held.model)
        job = self._jobs.find(held.job_id)
        if job is None:
            claim, job = self._broker.jobs.claim_of_new(held.job_id, held.chunk, held.token, by)
            self._jobs.add(job)
            if claim.answer is not ClaimAnswer.OTHER:
                return job, claim
        self._check_for_me(job, held)
        return job, self._broker.jobs.claim(held.job_id, held.chunk, held.token, by)

    def _claimant(self, model: str) -> Claimant:
        fingerprint = self._encoders[model].backend.fingerprint
        return Claimant(self.instance, fingerprint, self._hardware.precision, model)

    def _check_for_me(self, job: JobStatus, held: Held) -> None:
        if job.precision != self._hardware.precision:
            # Two hosts configure a class of this name differently.
            raise _NotForMe(f"the job wants {job.precision}, and this worker offers {self._hardware.precision}")
        if job.model != held.model and self._is_kept_apart(held.job_id, held.model):
            raise _NotForMe(f"another live worker serves {job.model} with other files")

    def _read(self, held: Held, job: JobStatus, ticket: Ticket, claim: Claim) -> ClaimedChunk | None:
        """Read the text of a chunk; None if it could not be claimed, or the text is damaged."""
        if not self._is_ours(held, ticket, claim):
            self._broker.send_issued(job, over=held.chunk)  # other jobs may wait for the room that its ticket had
            return None
        self.in_hand.take(held)
        try:
            text = self._store.text(held, claim)
            if text is None:
                raise WireForeign("its bytes are gone from chunk_files")
            chunk = wire.decode_input(text)
        except WireError as error:  # of another version too: in a job of this worker's version that is damage
            self._tell_unreadable(job, held, error)
            return None
        return ClaimedChunk(held, job, self._encoders[held.model], text, chunk, claim.given_up)

    def _gather(self, claimed: ClaimedChunk, joined: list[_Joined]) -> None:
        """Claim waiting chunks that may be encoded with this one. If that fails, it is encoded with fewer."""
        try:
            found = [
                (each, Held(each.ticket.job_id, each.ticket.chunk, secrets.token_hex(8), claimed.held.model))
                for each in self._gathering.candidates(claimed)
            ]
            wanted = [(held.job_id, held.chunk, held.token) for _, held in found]
            claims = self._broker.jobs.claim_all(wanted, self._claimant(claimed.held.model))
            for (candidate, held), claim in zip(found, claims, strict=True):
                if isinstance(claim, Claim):
                    taken = self._take(candidate, held, claim)
                    joined += [taken] if taken else []
            self._gathering.took(claimed.job.queue, [each.queued for each in joined])
        except (BrokerUnavailable, NotPermitted) as error:
            log.info("no more chunks are joined to it: %s", error, extra=claimed.held.fields)

    def _take(self, candidate: Candidate, held: Held, claim: Claim) -> _Joined | None:
        """Read a waiting chunk that was asked for; None if it is left to its ticket."""
        queued, job = candidate.ticket, candidate.job
        ticket = Ticket(job.queue, queued.job_id, queued.chunk, queued.facts)
        try:
            claimed = self._read(held, job, ticket, claim)
            if claimed is not None and may_be_joined(claimed):
                return _Joined(queued, ticket, claimed)
            if claimed is not None:  # it has failed since we looked
                self._store.give_back(held, delay_s=0)
        except JobError as error:
            log.info("the chunk is not wanted: %s", error, extra=held.fields)
        except BrokerUnavailable as error:  # the lease lapses, and the others are claimed too
            log.warning("the chunk has to wait: %s", error, extra=held.fields)
        except BaseException:
            self.in_hand.drop(held)
            raise
        self.in_hand.drop(held)
        return None

    def _has_other_files(self, job_id: str, model: str) -> bool:
        """Whether the name in an unclaimed job, here another spelling of `model`, means other files elsewhere.

        This is so if a live worker was started with that name, and its settings keep the two spellings apart. If we
        claimed the first chunk, the job would be pinned to our files.
        """
        job, ours = self._jobs.get(job_id), self._encoders[model].backend.fingerprint
        if job.model_fingerprint is not None:
            return False
        named = (row.loaded.get(job.model) for row in self._broker.workers.alive(job.queue))
        return any(served is not None and served.fingerprint != ours for served in named)

    def _is_ours(self, held: Held, ticket: Ticket, claim: Claim) -> bool:
        """Whether a chunk was claimed; notes what the answer says of it."""
        self._telemetry.claimed(held.model, claim, self._age_s(ticket))
        if claim.answer is not ClaimAnswer.OK:
            log.log(
                logging.WARNING if claim.answer in (ClaimAnswer.MISMATCH, ClaimAnswer.LOST) else logging.DEBUG,
                "the chunk can't be claimed: %s",
                f"{claim.answer} {claim.fingerprint}".rstrip(),
                extra=held.fields,
            )
            return False
        held.attempt, held.doubts = claim.attempt, claim.doubts
        return True

    def _finish(self, claimed: ClaimedChunk, ticket: Ticket, over: list[_Over], share: Share | None) -> None:
        """Encode a chunk, and store its result or leave it to another worker. Raises as :meth:`ChunkStore.complete`."""
        held, job = claimed.held, claimed.job
        encoded = self._encoding.encode(claimed, share)
        if encoded is None or self.sick is not None:  # another thread may have found out that these vectors are wrong
            # Of several chunks in a batch, any may have left this worker of no use.
            shared = self.sick is not None and share is not None
            doubts = (held.doubts or Doubts()).with_sick(self.instance, None) if shared else None
            self._store.give_back(held, delay_s=0, doubts=doubts)
            self._broker.tickets.send(job.queue, held.job_id, [held.chunk])
        elif second_word.counts(encoded, held.doubts, self.instance, partial(self._others, job.queue)):
            self._unsure.end()
            self._telemetry.encoded(held.model, encoded.tokens, encoded.positions)
            self._store.complete(claimed, encoded)
            over.append((job, ticket))
        else:
            self._ask_another(job, held, encoded)

    def _age_s(self, ticket: Ticket) -> float | None:
        """How long ago a ticket was first sent, in seconds; None if it does not say."""
        sent_ms, now_ms = ticket.facts.get("sent_ms"), self._broker.connection.about_now_ms()
        # A ticket may say anything, and clocks agree only roughly.
        return max(0, now_ms - sent_ms) / 1000 if type(sent_ms) is int and 0 < sent_ms < 2 * now_ms else None

    def _others(self, queue: str) -> bool:
        return self._broker.workers.count(queue) > 1

    def _ask_another(self, job: JobStatus, held: Held, encoded: EncodedChunk) -> None:
        """Leave a chunk to another worker, because this one can't decide alone that its rows fail."""
        log.warning(
            "%d records failed here, twice: another worker is to try them before they count as failed",
            len(encoded.doubtful),
            extra=held.fields,
        )
        held.rest_s = second_word.rest_s(self._unsure, encoded)
        self._leave_to_another(job, held, (held.doubts or Doubts()).with_rows(self.instance, encoded.doubtful))

    def _leave_to_another(self, job: JobStatus, held: Held, doubts: Doubts, trouble: str = "") -> None:
        self._doubted.add(held.job_id, held.chunk)
        delay_s = min(_LEFT_DELAY_S, self._broker.settings.limits.reissue_s)
        self._store.give_back(held, delay_s=delay_s, trouble=trouble, doubts=doubts)
        # At once: a worker that waits for a ticket at this moment is not this one.
        self._broker.tickets.send(job.queue, held.job_id, [held.chunk])

    def _tell_unreadable(self, job: JobStatus, held: Held, error: WireError) -> None:
        """Give back a chunk whose input can't be read here. If this worker is not to blame, the input is dropped."""
        log.error("the chunk's input is damaged: %s", error, extra=held.fields)
        if second_word.counts_as_unreadable(held.doubts):
            self._broker.jobs.drop_input(held.job_id, held.chunk)
            what = "was damaged in Redis" if job.data is None else "is lost"
            trouble = f"its input {what}: {first_line(error)}"
            self._store.give_back(held, delay_s=0, trouble=trouble)
        else:
            trouble = f"worker {self.name} can't read its input: {first_line(error)}"
            doubts = (held.doubts or Doubts()).with_unreadable(self.instance)
            self._leave_to_another(job, held, doubts, trouble)

    def _offer_again(self, error: Exception, held: Held, ticket: Ticket) -> None:
        """Give back a chunk that failed, and not because of a record; the worker may be to blame."""
        try:
            self._encoding.check_worker(self._encoders[held.model])
        except WorkerSick as sick:
            self._fall_sick(sick, held, ticket)
        except DeviceLost as lost:
            self._end(lost, held)
        else:
            self._store.give_back(held, delay_s=_OFFERED_AGAIN.pause_s(held.attempt), trouble=redacted(error))

    def _fall_sick(self, error: WorkerSick, held: Held, ticket: Ticket) -> None:
        """Take no more chunks, give back this one without blame, and have the process end."""
        if self.sick is None:  # the chunks that were prepared behind the first one fail too
            log.critical("%s: ending this process", error, extra=held.fields)
        self.sick = error
        self.draining.set()
        self._telemetry.failed(held.model)
        # The chunk may be to blame after all: a record may leave a backend of no use.
        doubts = (held.doubts or Doubts()).with_sick(self.instance, held.row)
        self._store.give_back(held, delay_s=0, trouble=f"worker {self.name}: {first_line(error)}", doubts=doubts)
        self._returned.append(ticket)
        self.leave(error.exit_code)

    def _end(self, error: DeviceLost, held: Held) -> NoReturn:
        """End the process at once: its successor may have the device again. The chunks that it holds become suspect."""
        log.critical("%s: ending this process", error, extra=held.fields)
        logging.shutdown()
        os._exit(error.exit_code)

    @property
    def name(self) -> str:
        """The worker's name: its instance without what tells it from earlier processes."""
        return self.instance.rpartition("/")[0] or self.instance


@dataclass(slots=True)
class _Joined:
    """A chunk that was claimed to be encoded with another one."""

    queued: QueuedTicket
    ticket: Ticket
    claimed: ClaimedChunk
    share: Share | None = None


#: A chunk that has ended: its job, and its ticket.
_Over = tuple[JobStatus, Ticket]


class _NotForMe(Exception):
    """Raised for a ticket that another worker of its queue may handle."""

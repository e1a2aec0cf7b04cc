"""What a worker does at a bell: take the next chunk, encode it, store its result, or give it back."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from embedctl.queueing.broker import Broker
from embedctl.store import Claim, Claimant, Doubts, Given, JobStatus
from embedctl_config import keys, wire
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
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from embedctl_workers.encoding.prepared import Stopped
from embedctl_workers.redaction import first_line, redacted, redacted_exc_info
from embedctl_workers.serving import second_word
from embedctl_workers.serving.chunk_encoding import ChunkEncoding, Share, SharedDevice
from embedctl_workers.serving.chunk_store import ChunkStore
from embedctl_workers.serving.claimed import ClaimedChunk, KnownJobs, is_small, may_be_joined, room
from embedctl_workers.serving.in_hand import Held, InHand, Isolation
from embedctl_workers.serving.interrupts import SignalledEvent
from embedctl_workers.serving.telemetry import Telemetry

log = logging.getLogger(__name__)

#: A chunk whose task failed, and not because of a record, is offered again after this back-off.
_OFFERED_AGAIN = Policy(10.0, 30 * 60.0)
#: What came of a bell if no chunk could be taken.
NOTHING = "nothing was ready"
#: For so long, a chunk that this worker could not do is left to other workers (seconds).
_LEFT_S = 5.0
#: How long a thread rests after a bell for chunks that are left to other workers: one of them hears the next (seconds).
_LATER_S = 0.5
#: Whether another worker serves a model's name with other files is looked up once in so long (seconds).
_LOOKED_UP_S = 10.0


class ChunkRunner:
    """Turns chunks into stored vectors. One thread encodes while others claim and prepare.

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
        self._unsure = Streak()
        self._isolation = Isolation()
        self.in_hand = InHand()  #: the chunks that this worker holds
        self.quarantine = False  #: whether it takes what may kill a worker, and nothing else
        self.draining = SignalledEvent()  #: set when the worker is to stop
        self.hurrying = SignalledEvent()  #: set when it is to stop without finishing the chunk that it is encoding
        self.sick: WorkerSick | None = None  #: why this worker takes no more chunks; None while it is well
        #: ends this process in good order, with an exit status; called once the worker is sick
        self.leave: Callable[[int], None] = lambda status: None
        self._store = ChunkStore(broker, hardware, telemetry, self.draining)
        device = SharedDevice(self.in_hand, telemetry, self.draining, self.hurrying, broker.connection.about_now_ms)
        self._encoding = ChunkEncoding(encoders, self._store, device, self._isolation)
        self.speed = self._encoding.speed  #: by model
        self._jobs = KnownJobs(broker.jobs)
        #: Queue → whether this worker begins jobs of it, and when that is looked up again.
        self._begins: dict[str, tuple[bool, float]] = {}

    @property
    def backends(self) -> list[Backend]:
        return [each.backend for each in self._encoders.values()]

    def warm_up(self) -> None:
        self._encoding.warm_up(self.backends)

    def run(self, model: str, queue: str, tell: Callable[[str], object] = lambda words: None) -> str:
        """Take the next chunk of a queue, and others that fit into its batch; returns which, in words.

        `tell` is told the first one before. Whatever else goes wrong, nothing is raised: the chunks are given again.
        """
        with self._isolation:
            given = Given() if self.draining.is_set() else self._ask(model, queue)
            # It may raise: no lease is renewed yet.
            tell(in_words(given.claims[0]) if given.claims else NOTHING)
            taken = [self._take(claim, model) for claim in given.claims]
            if taken:
                self._over(taken[0], partial(self._run, taken))
                for joined in taken[1:]:
                    self._over(joined, partial(self._finish, joined))
        rests = [each.held.rest_s for each in taken] + [_LATER_S] * given.later
        if rest_s := max(rests, default=0.0):
            self.draining.wait(rest_s)
        return ", ".join(in_words(each.claim) for each in taken) or NOTHING

    def _ask(self, model: str, queue: str) -> Given:
        """Claim the next chunk of a queue; nothing if Redis can't be reached."""
        try:
            given = self._broker.jobs.next(queue, secrets.token_hex(8), self._claimant(model, queue))
        except (BrokerUnavailable, NotPermitted, JobError) as error:
            log.warning("no chunk can be taken: %s", error)
            return Given()
        for job_id, why in given.unusable:
            log.warning("the job is left alone: %s", why, extra={"job": job_id})
        return given

    def _over(self, each: _Taken, work: Callable[[], None]) -> None:
        """Do the work of a chunk, which this worker holds no longer then."""
        try:
            self._safely(each.held, work)
        finally:
            self.in_hand.drop(each.held)

    def _safely(self, held: Held, work: Callable[[], None]) -> None:
        """Do the work of a chunk; whatever is raised, see to it that it is given again."""
        try:
            work()
        except WorkerSick as error:
            self._fall_sick(error, held)
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
            self._store.give_back(held, delay_s=0)
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
            self._offer_again(error, held)

    def _take(self, claim: Claim, model: str) -> _Taken:
        """Note that this worker holds a chunk, from now on."""
        held = Held(claim.job_id, claim.chunk, claim.token, model, claim.attempt, doubts=claim.doubts)
        self.in_hand.take(held)
        self._telemetry.claimed(model, claim)
        return _Taken(held, claim)

    def _run(self, taken: list[_Taken]) -> None:
        """Encode a chunk and store its result. `taken`, which holds it, gets others that are in its batches."""
        first = taken[0]
        first.claimed = self._read(first.held, first.claim)
        if first.claimed is None:
            return
        # A worker that handles one chunk at a time and has room for another would have it, if one waited.
        if is_small(first.claimed) and (self._hardware.prefetch == 1 or self._isolation.has_others()):
            self._encoding.wait_for_device()  # more chunks come meanwhile
            if not self.draining.is_set():
                taken += self._gathered(first.claimed)
        if len(taken) > 1:
            shares = self._encoding.encode_together([each.claimed for each in taken if each.claimed])
            for each, share in zip(taken, shares, strict=True):
                each.share = share
        self._finish(first)

    def _claimant(self, model: str, queue: str) -> Claimant:
        fingerprint = self._encoders[model].backend.fingerprint
        begins = self._begins_jobs(model, queue)
        return Claimant(self.instance, fingerprint, self._hardware.precision, begins, self.quarantine)

    def _begins_jobs(self, model: str, queue: str) -> bool:
        """Whether this worker takes jobs of a queue that no worker has begun, and so pins them to its files."""
        if keys.of_queue(queue)[1] == model:
            return True
        begins, until = self._begins.get(queue, (True, 0.0))
        if time.monotonic() >= until:
            begins = not self._has_other_files(model, queue)
            self._begins[queue] = begins, time.monotonic() + _LOOKED_UP_S
        return begins

    def _read(self, held: Held, claim: Claim) -> ClaimedChunk | None:
        """Read the text of a chunk and the facts of its job; None if the text is damaged, and the chunk given back."""
        job = self._jobs.known(held.job_id, claim.job)
        try:
            text = self._store.text(held, claim)
            if text is None:
                raise WireForeign("its bytes are gone from chunk_files")
            chunk = wire.decode_input(text)
        except WireError as error:  # of another version too: in a job of this worker's version that is damage
            self._tell_unreadable(job, held, error)
            return None
        return ClaimedChunk(held, job, self._encoders[held.model], text, chunk, claim.given_up)

    def _gathered(self, claimed: ClaimedChunk) -> list[_Taken]:
        """Claim waiting chunks that may be encoded with this one. If that fails, it is encoded with fewer."""
        by = self._claimant(claimed.held.model, claimed.job.queue)
        try:
            given = self._broker.jobs.gather(claimed.job, secrets.token_hex(8), by, room(claimed))
        except (BrokerUnavailable, NotPermitted, JobError) as error:
            log.info("no more chunks are joined to it: %s", error, extra=claimed.held.fields)
            return []
        others = [self._take(claim, claimed.held.model) for claim in given.claims]
        for each in others:
            self._safely(each.held, partial(self._read_joined, each))
            if each.claimed is None:
                self.in_hand.drop(each.held)
        return [each for each in others if each.claimed is not None]

    def _read_joined(self, each: _Taken) -> None:
        """Read a chunk that is to be joined to another one; it is given back if it can't be."""
        claimed = self._read(each.held, each.claim)
        if claimed is not None and may_be_joined(claimed):
            each.claimed = claimed
        elif claimed is not None:
            self._store.give_back(each.held, delay_s=0)

    def _has_other_files(self, model: str, queue: str) -> bool:
        """Whether the name in a queue, here another spelling of `model`, means other files elsewhere.

        This is so if a live worker was started with that name, and its settings keep the two spellings apart. If we
        claimed the first chunk of a job, the job would be pinned to our files.
        """
        name, ours = keys.of_queue(queue)[1], self._encoders[model].backend.fingerprint
        named = (row.loaded.get(name) for row in self._broker.workers.alive(queue))
        return any(served is not None and served.fingerprint != ours for served in named)

    def _finish(self, each: _Taken) -> None:
        """Encode a chunk, and store its result or leave it to another worker. Raises as :meth:`ChunkStore.complete`."""
        claimed, share = each.claimed, each.share
        if claimed is None:
            return
        held, job = claimed.held, claimed.job
        encoded = self._encoding.encode(claimed, share)
        if encoded is None or self.sick is not None:  # another thread may have found out that these vectors are wrong
            # Of several chunks in a batch, any may have left this worker of no use.
            shared = self.sick is not None and share is not None
            doubts = (held.doubts or Doubts()).with_sick(self.instance, None) if shared else None
            self._store.give_back(held, delay_s=0, doubts=doubts)
        elif second_word.counts(encoded, held.doubts, self.instance, partial(self._others, job.queue)):
            self._unsure.end()
            self._telemetry.encoded(held.model, encoded.tokens, encoded.positions)
            self._store.complete(claimed, encoded)
            self.in_hand.completed()
        else:
            self._ask_another(held, encoded)

    def _others(self, queue: str) -> bool:
        return self._broker.workers.count(queue) > 1

    def _ask_another(self, held: Held, encoded: EncodedChunk) -> None:
        """Leave a chunk to another worker, because this one can't decide alone that its rows fail."""
        log.warning(
            "%d records failed here, twice: another worker is to try them before they count as failed",
            len(encoded.doubtful),
            extra=held.fields,
        )
        held.rest_s = second_word.rest_s(self._unsure, encoded)
        self._leave_to_another(held, (held.doubts or Doubts()).with_rows(self.instance, encoded.doubtful))

    def _leave_to_another(self, held: Held, doubts: Doubts, trouble: str = "") -> None:
        self._store.give_back(held, delay_s=0, trouble=trouble, doubts=doubts, others_first_s=_LEFT_S)

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
            self._leave_to_another(held, doubts, trouble)

    def _offer_again(self, error: Exception, held: Held) -> None:
        """Give back a chunk that failed, and not because of a record; the worker may be to blame."""
        try:
            self._encoding.check_worker(self._encoders[held.model])
        except WorkerSick as sick:
            self._fall_sick(sick, held)
        except DeviceLost as lost:
            self._end(lost, held)
        else:
            self._store.give_back(held, delay_s=_OFFERED_AGAIN.pause_s(held.attempt), trouble=redacted(error))

    def _fall_sick(self, error: WorkerSick, held: Held) -> None:
        """Take no more chunks, give back this one without blame, and have the process end."""
        if self.sick is None:  # the chunks that were prepared behind the first one fail too
            log.critical("%s: ending this process", error, extra=held.fields)
        self.sick = error
        self.draining.set()
        self._telemetry.failed(held.model)
        # The chunk may be to blame after all: a record may leave a backend of no use.
        doubts = (held.doubts or Doubts()).with_sick(self.instance, held.row)
        self._store.give_back(held, delay_s=0, trouble=f"worker {self.name}: {first_line(error)}", doubts=doubts)
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


@dataclass(slots=True, eq=False)
class _Taken:
    """A chunk that this worker holds. `claimed` is None until its text was read."""

    held: Held
    claim: Claim
    claimed: ClaimedChunk | None = None
    share: Share | None = None


def in_words(claim: Claim) -> str:
    """The chunk of a claim, in words."""
    return f"job {claim.job_id}, chunk {claim.chunk}"

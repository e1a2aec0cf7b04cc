"""The life of a job and of its chunks: one script for each step that must be atomic."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any, Literal

from embedctl.chunk_files import ChunkFiles, Upload, Where
from embedctl.chunk_files.references import MOST_BYTES, is_reference
from embedctl.store.answers import Added, Claimant, Completed, Doubts, Given, InlineJob, JobSpec, claim_of
from embedctl.store.connection import Connection
from embedctl.store.ledger import asked_with_job
from embedctl.store.quotas import Quotas, exceeded, is_rate
from embedctl.store.reading import JobReader, damaged
from embedctl.store.scripts import ScriptCall, flat
from embedctl.store.status import COUNTS, JobState, JobStatus, lifetime_s
from embedctl_config import keys, tenants, wire
from embedctl_config.errors import (
    BrokerRefused,
    BrokerUnavailable,
    CorpusChanged,
    EmbedctlError,
    JobCancelled,
    JobError,
    JobFailed,
    JobLost,
    JobStopped,
    JobUnfinished,
    SettingsError,
    WireForeign,
)
from embedctl_config.fingerprint import deciding
from embedctl_config.settings import Settings

log = logging.getLogger(__name__)

_SLICE = 200

#: A larger result is sent in parts of this size (bytes), each with a full socket timeout. A retry repeats one part.
PART_BYTES = 1024 * 1024
#: The default of Redis' `proto-max-bulk-len`; a result must be smaller (bytes).
MAX_RESULT_BYTES = 512 * 1024 * 1024


class JobStore(JobReader):
    """Jobs in Redis: the steps of their lives, and the reads of :class:`JobReader`.

    Each step of a chunk's life takes one round trip, except :meth:`complete` with a large result. Every method raises
    BrokerUnavailable if Redis can't be reached. An answer to a worker is returned; an answer to a person is raised as
    an error of the job.
    """

    def __init__(self, connection: Connection, settings: Settings, files: ChunkFiles | None = None) -> None:
        super().__init__(connection, files)
        self._settings = settings
        self._quotas = Quotas(connection)
        self._lease_ms = int(settings.lease_s * 1000)

    def create(self, spec: JobSpec) -> tuple[str, bool]:
        """Make a job, or find the job of this idempotency key; returns its id, and whether it is new.

        Raises QuotaExceeded if its tenant has as many jobs, or as much waiting, as it may have.
        """
        job_id, answer, rest = self._created(spec)
        if answer == "full" and not is_rate(rest):
            self._quotas.correct(spec.tenant)
            job_id, answer, rest = self._created(spec)
        if answer == "full":
            raise exceeded(spec.tenant, rest)
        return (rest[0].decode(), False) if answer == "exists" else (job_id, True)

    def _created(self, spec: JobSpec) -> tuple[str, str, list[Any]]:
        """Ask for a job by ids that are drawn until nobody has one; returns the last one, and the answer. Raises NoRoom
        if there is none of what :func:`taken_with_job` names."""
        while True:
            with asked_with_job() as room:
                job_id, _, call = self._creation(spec, room.said)
                answer, rest = self._connection.script(call.name, call.keys, call.args)
                room.heard(answer, rest)
            if answer != "taken":
                return job_id, answer, rest

    def create_inline(self, spec: JobSpec, value: bytes, *, digest: bytes, rows: int, token: str) -> InlineJob:
        """Make an inline job, of one chunk: create, add and seal in one round trip.

        It has no idempotency key. The value is the chunk in wire format, the token the one that :meth:`hold` takes.
        Raises BrokerUnavailable if Redis can't be reached, and may have made the job; or if it is full, and has not.
        Raises NoRoom as :meth:`create` does, and QuotaExceeded for what the tenant has begun in this second alone.
        """
        with asked_with_job() as room:
            job_id, made_with, creation = self._creation(spec, room.said)
            created, *steps = self._take_inline(job_id, made_with, creation, value, digest, rows, token)
            if isinstance(refused := self._connection.answer_of(created), BrokerRefused):
                raise refused
            room.heard(*created)
        if created[0] == "full" and is_rate(created[1]):
            raise exceeded(spec.tenant, created[1])
        done = [isinstance(step, tuple) and step[0] == "ok" for step in steps]
        sealed_at = steps[1][1][1].decode() if all(done) else None
        return InlineJob(job_id if created[0] == "created" else None, rows, sealed_at)

    def _take_inline(
        self, job_id: str, made_with: str, creation: ScriptCall, value: bytes, digest: bytes, rows: int, token: str
    ) -> list[Any]:
        job, producer = keys.job(job_id), keys.producer(job_id)
        chunk = [keys.chunk_input(job_id, 0), keys.chunk_result(job_id, 0)]
        calls = [
            creation,
            ScriptCall(
                "add",
                [job, producer, *chunk],
                [job_id, 0, digest, rows, value, token, keys.PRODUCER_LEASE_S * 1000, made_with],
            ),
            ScriptCall("seal", [job, producer], [job_id, 1, made_with]),
        ]
        try:
            return self._connection.raw_scripts(calls)
        except BrokerUnavailable:
            raise
        except BaseException:  # Ctrl-C
            with suppress(EmbedctlError):
                self.cancel(job_id)
            raise

    def _creation(self, spec: JobSpec, room: str) -> tuple[str, str, ScriptCall]:
        """The id of a new job, the token by which the job is known to be this one, and the call that makes it; `room`
        is what the ledger of a gateway says."""
        now = self._connection.recent_now_ms()
        ttl_ms = int(spec.ttl_s * 1000)
        job_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now / 1000))}-{secrets.token_hex(5)}"
        fields: dict[str, Any] = {
            "version": wire.VERSION,
            "state": JobState.SUBMITTING,
            "model": spec.model,
            "hardware": spec.hardware,
            "precision": spec.precision,
            "options": json.dumps(dict(spec.options), sort_keys=True),
            "ttl_ms": ttl_ms,
            "created_ms": now,
            "progressed_ms": now,
            "alike": _alike(spec.options, spec.data),
            **dict.fromkeys(COUNTS, 0),
            "next": 0,
        }
        script_keys = [keys.job(job_id), keys.quota(spec.tenant)]
        if spec.idempotency_key is not None:
            script_keys.append(keys.idempotency(spec.idempotency_key, spec.tenant))
            fields["idempotency_key"] = script_keys[-1]
        perhaps = ("max_errors", "max_errors_share", "results_high_water", "data")
        fields |= {name: value for name in perhaps if (value := getattr(spec, name)) is not None}
        # Only what differs, because there are many jobs.
        shares = {"tenant": spec.tenant, "lane": spec.lane, "weight": spec.weight}
        plain = {"tenant": tenants.DEFAULT, "lane": tenants.NORMAL, "weight": None}
        fields |= {name: value for name, value in shares.items() if value != plain[name]}
        life_ms = int(lifetime_s(spec.ttl_s) * 1000)
        kept_ms = int(life_ms * keys.CHUNK_TTL_FACTOR)
        times = [now, life_ms, kept_ms, keys.job(""), now + keys.LOOK_AFTER_S * 1000]
        queue = keys.queue(spec.hardware, spec.model)
        token = secrets.token_hex(16)
        args = [job_id, *times, queue, room, spec.tenant, spec.keeps, token, *flat(fields)]
        return job_id, token, ScriptCall("create", script_keys, args)

    def hold(self, job_id: str, token: str, *, lease_s: float | None = None) -> bool:
        """Renew the producer's lease of a job, or take it over from a dead producer; 0 seconds give it up.

        True also once the job is sealed.
        """
        lease_ms = max(1, int((keys.PRODUCER_LEASE_S if lease_s is None else lease_s) * 1000))
        answer, _ = self.job_script("hold", job_id, [keys.producer(job_id)], [token, lease_ms])
        return answer != "held"

    def upload(self, job: JobStatus, kind: Literal["in", "out"], chunk: int, payload: bytes) -> Upload:
        """A chunk's bytes on their way to the job's place; raises SettingsError if this process does not know it."""
        if job.data is not None and job.data != self._files.place_id:
            raise SettingsError(
                f"job {job.id} keeps its chunks outside of Redis, in a place that this process does not know: set "
                "chunk_files to what its producer has"
            )
        return Upload(self._files if job.data is not None else ChunkFiles(), Where(job.id, kind, chunk), payload)

    def add(self, job_id: str, chunk: int, value: bytes, *, digest: bytes, rows: int, token: str) -> tuple[Added, int]:
        """Store a chunk's input once.

        Args:
            value: of the :class:`Upload` of the chunk in wire format; empty to ask only whether the chunk is wanted.
            token: the producer's token, as given to :meth:`hold`.

        Returns the answer, and how many bytes of the job's text wait to be encoded.

        Raises:
            JobLost: an earlier chunk is missing, because Redis lost its last writes in a crash.
            QuotaExceeded: the limits of the job's tenant leave no room for it now.
        """
        answer, rest = self.job_script(
            "add",
            job_id,
            [keys.producer(job_id), keys.chunk_input(job_id, chunk), keys.chunk_result(job_id, chunk)],
            [chunk, digest, rows, value, token, keys.PRODUCER_LEASE_S * 1000],
        )
        if answer == "gap":
            raise self._cut_off(job_id, int(rest[0]), chunk)
        if answer == "full":
            raise exceeded(rest[3].decode(), rest)
        return Added(answer), int(rest[0]) if rest else 0

    def seal(self, job_id: str, chunks: int) -> None:
        """Say that a job has all its chunks.

        Raises:
            CorpusChanged: the job holds more chunks, or was sealed with another number.
            JobLost: the job is not sealed and holds fewer chunks, because Redis lost its last writes in a crash.
            JobFailed, JobStopped: it was ended before; see :meth:`why_stopped`.
        """
        answer, rest = self.job_script("seal", job_id, [keys.producer(job_id)], [chunks])
        if answer == "stopped":
            raise self.why_stopped(job_id)
        if answer == "gap" and int(rest[0]) < chunks:  # Redis had accepted all of them
            raise self._cut_off(job_id, int(rest[0]), chunks)
        if answer == "gap" or (answer == "sealed" and int(rest[0]) != chunks):
            raise CorpusChanged(
                f"job {job_id} holds {int(rest[0])} chunks, and the corpus now makes {chunks}: the job was begun with "
                "another corpus. Submit this corpus as a new job."
            )

    def close_retry(self, job_id: str) -> bool:
        """Seal a job if the process that retried its failed records died; returns whether it is sealed now."""
        return self._script("seal", job_id, [keys.producer(job_id)], [""])[0] == "ok"

    def next(self, queue: str, token: str, by: Claimant) -> Given:
        """Lease the chunk of a queue whose turn it is, with its text. The token identifies the claim, and the call: if
        its answer is lost, another call with the token gives the same chunk."""
        return self._given(token, self._connection.script("next", *self._next(queue, token, by)))

    def gather(self, job: JobStatus, token: str, by: Claimant, most_bytes: int) -> Given:
        """Lease small chunks that may be in one batch with those of a job, of at most so many bytes together."""
        alike = _alike(job.options, job.data)
        script_keys, args = self._next(job.queue, token, by)
        return self._given(token, self._connection.script("next", script_keys, [*args, alike, most_bytes]))

    def ring(self, precision: str, served: Mapping[str, str]) -> None:
        """Ring for the queues (queue → fingerprint) of a worker that have chunks which it can take, and no bell."""
        self._connection.script("ring", [], [precision, *flat(served)])

    def _next(self, queue: str, token: str, by: Claimant) -> tuple[list[str], list[Any]]:
        args = [queue, token, by.instance, by.fingerprint, self._lease_ms, self._settings.interactive_share]
        return [keys.given(token)], [*args, by.precision, int(by.takes_new), int(by.quarantine)]

    def _given(self, token: str, answer: tuple[str, list[Any]]) -> Given:
        said, (met, *claims) = answer
        return Given(
            [claim_of(token, facts, self._job_in(*facts)) for facts in claims],
            later=said == "later",
            unusable=[(job_id.decode(), why.decode()) for job_id, why in met],
        )

    def _job_in(self, job_id: bytes, *facts: Any) -> JobStatus | None:
        """The job in a claim; None if it does not hold one."""
        if len(facts) == 6:
            return None
        flat_facts, ttl_ms, alive = facts[6:]
        return self._known(job_id.decode(), dict(zip(flat_facts[::2], flat_facts[1::2], strict=True)), ttl_ms, alive)

    def renew(self, job_id: str, chunk: int, token: str, *, row: int | None = None) -> str:
        """Renew a lease: `ok`, `done`, `not_owner`, `gone`, `cancelled` or `version` (of another).

        The row of a suspect chunk is the one that the worker begins now; -1 after the last one. If the worker dies
        before the next call with a row, this row is given up.
        """
        noted = [] if row is None else [row if row >= 0 else ""]
        return self._script("renew", job_id, [], [chunk, token, self._lease_ms, *noted])[0]

    def end_leases(self, job_ids: Sequence[str], dead: Collection[str]) -> list[set[str]]:
        """End at once the leases of these jobs that dead worker instances hold; the jobs that each of them held."""
        in_hand: dict[str, set[str]] = defaultdict(set)
        for at in range(0, len(job_ids), _SLICE):
            part = job_ids[at : at + _SLICE]
            owners = self._connection.ask_each(  # one entry per lease
                part, lambda pipe, job_id: pipe.hgetall(keys.owners(job_id)), refusals=True
            )
            calls = []
            for job_id, held in zip(part, owners, strict=True):
                for chunk, token, instance in _leases(held, dead):
                    in_hand[instance].add(job_id)
                    calls.append(ScriptCall("renew", [keys.job(job_id)], [job_id, chunk, token, 0]))
            self._connection.scripts(calls)
        return [*in_hand.values()]

    def release(
        self,
        job_id: str,
        chunk: int,
        token: str,
        *,
        delay_s: float,
        trouble: str = "",
        doubts: Doubts | None = None,
        others_first_s: float = 0.0,
    ) -> bool:
        """Give the lease of an unfinished chunk back. It may be taken again after the delay.

        Args:
            trouble: what went wrong, for :attr:`JobStatus.trouble`; never text of a record.
            doubts: the failures of this worker and of earlier ones, for the next claim; unchanged if None.
            others_first_s: for so long only other workers may take it, if there are any.
        """
        told: list[Any] = ["" if doubts is None else doubts.as_json()]
        if others_first_s:
            told.append(int(others_first_s * 1000))
        args = [chunk, token, int(delay_s * 1000), trouble, *told]
        return self._script("release", job_id, [], args)[0] == "ok"

    def drop_input(self, job_id: str, chunk: int) -> None:
        """Remove a damaged input. The chunk then counts as lost, and submitting the same corpus repairs it."""
        key = keys.chunk_input(job_id, chunk)
        with self._connection.client() as client:
            value = client.getrange(key, 0, MOST_BYTES - 1)
            if not is_reference(value):
                client.unlink(key)
                return
        self.job_script("drop", job_id, [key], [value, chunk])

    def drop_gone(self, job_id: str, chunk: int) -> bool:
        """Forget references to bytes of a chunk, and of retries of its records, that are gone or damaged.

        All of the bytes are read. If this returns true, the chunk counts as lost, and adding it again repairs it.
        """
        forgot = False
        later: int | None = chunk
        while later is not None:
            for key, at in ((keys.chunk_input(job_id, later), [later]), (keys.chunk_result(job_id, later), [])):
                with self._connection.client() as client:
                    value = client.get(key)
                if value is not None and is_reference(value) and not self._is_readable(value):
                    self.job_script("drop", job_id, [key], [value, *at])
                    forgot = True
            later = self.retried_as(job_id, later)
        return forgot

    def _is_readable(self, value: bytes) -> bool:
        with suppress(WireForeign):
            return self._files.get(value) is not None
        return False

    def complete(
        self, job_id: str, chunk: int, token: str, value: bytes, report: Completed, *, fingerprint: str
    ) -> str:
        """Store a chunk's result and count it once: `ok`, `refused`, `mismatch`, `gone`, `cancelled` or `version`.

        A result is also refused if the job now holds another text for this chunk. Its value is that of :class:`Upload`;
        raises BrokerRefused if it is larger than Redis allows.

        The vectors are sent before the script, under a name that belongs to this claim, so that the script moves no
        bytes. After an error, another call sends only the parts that Redis does not have yet.
        """
        if len(value) >= MAX_RESULT_BYTES:
            raise BrokerRefused(
                f"its result has {len(value):,} bytes, but Redis takes fewer than {MAX_RESULT_BYTES:,} as one value: "
                "submit the corpus with a smaller chunk_size"
            )
        temporary = keys.uncommitted_result(job_id, chunk, token)
        of_chunk = [keys.chunk_input(job_id, chunk), keys.chunk_result(job_id, chunk), temporary]
        args: list[Any] = [job_id, chunk, fingerprint, *astuple(report), self._settings.interactive_share]
        if len(value) > PART_BYTES:
            args.append(len(value))
        call = ScriptCall("complete", [keys.job(job_id), *of_chunk], args)
        while True:
            answer = self._stored_and_counted(job_id, temporary, value, call)
            if answer in ("gone", "cancelled", "version"):
                with self._connection.client() as client:
                    client.unlink(temporary)
            if answer != "missing":
                return answer

    def _stored_and_counted(self, job_id: str, key: str, payload: bytes, complete: ScriptCall) -> str:
        """Store a result under the name that belongs to this claim, then count it: the answer of either step."""
        if len(payload) > PART_BYTES:
            answer = self._send_parts(job_id, key, payload)
            if answer == "ok":
                answer, _ = self._connection.script(complete.name, complete.keys, complete.args)
            return answer
        answers = self._connection.raw_scripts(
            [complete], put=lambda pipe: pipe.set(key, payload, ex=keys.UNCOMMITTED_TTL_S)
        )
        counted = self._connection.answer_of(answers[0])
        if isinstance(counted, BrokerRefused):
            raise counted
        return str(counted[0])

    def _send_parts(self, job_id: str, key: str, payload: bytes) -> str:
        def send(at: int, part: bytes) -> tuple[str, list[Any]]:
            return self._script("part", job_id, [key], [at, part, keys.UNCOMMITTED_TTL_S])

        answer, rest = send(0, b"")  # how many bytes does Redis have?
        while answer == "ok" and (at := int(rest[0])) < len(payload):
            answer, rest = send(at, payload[at : at + PART_BYTES])
        return answer

    def retry(self, job_id: str, chunk: int, new_chunk: int, token: str) -> int:
        """Put a chunk's failed records into a new chunk; returns their number. The job is open until sealed again.

        Raises JobUnfinished if the job has not ended, JobError if another process is retrying it, QuotaExceeded if its
        tenant may have no more jobs, and as :meth:`why_stopped` says if it was ended before its last record.
        """
        of_chunk = [keys.chunk_input(job_id, chunk), keys.retry_pointer(job_id, chunk)]
        script_keys = [keys.producer(job_id), *of_chunk, keys.chunk_input(job_id, new_chunk)]
        args = [chunk, new_chunk, token, keys.PRODUCER_LEASE_S * 1000]
        answer, rest = self.job_script("retry", job_id, script_keys, args)
        if answer == "busy":
            raise JobUnfinished(f"job {job_id} has not ended: retry its failed records after its end")
        if answer == "stopped":
            raise self.why_stopped(job_id)
        if answer in ("held", "gap"):
            raise JobError(f"job {job_id} is being retried by another process")
        if answer == "full":
            raise exceeded(rest[3].decode(), rest)
        return int(rest[0]) if answer == "ok" else 0

    def stop(self, job_id: str) -> None:
        """End a job now, and keep its results. An ended job stays as it is."""
        self.job_script("stop", job_id, [], [])

    def resume(self, job_id: str, token: str) -> bool:
        """Open a stopped job again, for its corpus to be added once more. False while another producer holds it.

        Raises JobStopped if its failed records were being retried when it was stopped.
        """
        answer, _ = self.job_script("resume", job_id, [keys.producer(job_id)], [token, keys.PRODUCER_LEASE_S * 1000])
        if answer == "retried":
            raise JobStopped(
                f"job {job_id} was stopped while its failed records were retried, so it can't go on: fetch what "
                "it has, and submit the corpus as a new job"
            )
        return answer != "held"

    def why_stopped(self, job_id: str) -> JobError:
        """The error for a caller that a job takes no records from, because it was ended before its last record."""
        status = self.status(job_id)
        if status.stopped_by == "damage":
            return damaged(job_id, (status.trouble or "").removeprefix("damaged: "))
        if status.stopped_by == "max_errors":
            return JobFailed(
                f"job {job_id} was ended by its error budget (max_errors); `embedctl errors {job_id}` lists what "
                f"failed, and `embedctl fetch {job_id}` writes what is done"
            )
        return JobStopped(
            f"job {job_id} was stopped: what is done can be fetched. Resume it with its corpus: embedctl submit "
            f"CORPUS --resume {job_id}"
        )

    def cancel(self, job_id: str) -> JobState:
        """End a job now, and free its chunks. Returns the state that the job then has."""
        answer, rest = self._script("cancel", job_id, [], [])
        if answer == "gone":
            raise self.absent(job_id)
        if answer == "version":
            raise self._of_other_version(job_id, rest[0].decode())
        return JobState(rest[0].decode()) if answer == "ended" else JobState.CANCELLED

    def job_script(self, name: str, job_id: str, more_keys: list[str], args: list[Any]) -> tuple[str, list[Any]]:
        """Run a script, and raise its answers about the whole job: `gone`, `cancelled` and `version`."""
        answer, rest = self._script(name, job_id, more_keys, args)
        if answer == "gone":
            raise self.absent(job_id)
        if answer == "cancelled":
            raise JobCancelled(f"job {job_id} was cancelled")
        if answer == "version":
            raise self._of_other_version(job_id, rest[0].decode())
        return answer, rest

    def _cut_off(self, job_id: str, there: int, told: int) -> JobLost:
        return JobLost(
            f"Redis lost its last writes of job {job_id}: only {there} of its first {told} chunks are left. Resume "
            f"after them: embedctl submit CORPUS --resume {job_id}"
        )

    def _script(self, name: str, job_id: str, more_keys: list[str], args: list[Any]) -> tuple[str, list[Any]]:
        return self._connection.script(name, [keys.job(job_id), *more_keys], [job_id, *args])


def _alike(options: Mapping[str, Any], data: str | None) -> str:
    """What jobs of one queue have in common if chunks of them may be in one batch."""
    return hashlib.sha256(json.dumps([data, deciding(options)], sort_keys=True).encode()).hexdigest()[:32]


def _leases(owners: object, dead: Collection[str]) -> Iterator[tuple[int, str, str]]:
    """The chunk, the token and the worker instance of each lease of the dead; none if Redis refused to read the job's
    owners."""
    for chunk, owner in owners.items() if isinstance(owners, dict) else ():
        token, instance = [*owner.decode().split(" "), ""][:2]
        if instance in dead:
            yield int(chunk), token, instance

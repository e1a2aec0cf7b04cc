"""The store of jobs that a gateway holds: the steps that their owners take, each in one call."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NoReturn

from embedctl.chunk_files import ChunkFiles
from embedctl.remote.calls import Asks
from embedctl.store import (
    BatchFacts,
    Connection,
    Drains,
    DrainState,
    Holder,
    InlineJob,
    JobSpec,
    JobState,
    JobStatus,
    JobStore,
    PartFacts,
    Upkeep,
    WorkerRegistry,
)
from embedctl.store.answers import Added
from embedctl.store.job_ids import SHORTEST, ambiguous
from embedctl.store.quotas import Quotas
from embedctl.store.reading import Event
from embedctl.store.scripts import ScriptCall
from embedctl.store.workers import GoneWorker, Offer, Offered
from embedctl_config import keys, tenants
from embedctl_config.errors import GatewayUnavailable, JobNotFound, SettingsError
from embedctl_config.retry import REDIS, RetryLimit
from embedctl_config.settings import NOT_BY_GATEWAY, Settings

#: Of a job's waiting text, until the gateway has said what its Redis takes (bytes).
_ROOM_BYTES = 64 * 1024 * 1024
#: A wait for an event lasts at most so long, as the gateway allows (seconds).
_WAIT_S = 10.0
_MOMENTS = ("created_at", "progressed_at", "started_at", "ended_at")
_TUPLES = ("lost_chunks", "near_models")
_STATUS_FIELDS = frozenset(each.name for each in dataclasses.fields(JobStatus))


class RemoteConnection(Connection):
    """No connection to Redis: what needs one says so."""

    def __init__(self, settings: Settings, calls: Asks) -> None:
        self._settings = settings
        self.calls = calls

    @contextmanager
    def client(self) -> Iterator[NoReturn]:
        raise SettingsError(NOT_BY_GATEWAY)
        yield

    def check_server(self) -> None:
        """The gateway has checked its Redis."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    about_now_ms = recent_now_ms = now_ms

    def full_bytes(self) -> None:
        """The gateway says of no job that it is stalled while its Redis is full."""

    def close(self) -> None:
        self.calls.close()


class RemoteJobs(JobStore):
    """As :class:`JobStore`, for the jobs of a key's tenant."""

    def __init__(self, connection: RemoteConnection, settings: Settings) -> None:
        super().__init__(connection, settings)
        self._ask = connection.calls.ask
        #: Most bytes of a job's text that are to wait for workers.
        self.room = _ROOM_BYTES
        self.quotas = RemoteQuotas(connection)
        self.drains = RemoteDrains(connection, self)
        #: The offer of the live workers that would take the job that was specified last.
        self.offers: dict[Offered, Offer] = {}
        #: The jobs that the idempotency keys of specified jobs have found.
        self._found: dict[str | None, str | None] = {}

    def spec(self, options: Mapping[str, Any]) -> JobSpec:
        """The specification that the gateway would give a job with these options; raises SettingsError if one is
        wrong."""
        told = self._ask("POST", "jobs", {**options, "dry_run": True}).fields
        spec, offer = JobSpec(**told["spec"]), told["offer"]
        self._found[spec.idempotency_key] = told["id"]
        self.offers = {}
        if offer is not None:
            known = {**offer, "prompts": None, "fingerprints": frozenset(offer["fingerprints"])}
            self.offers[spec.hardware, spec.model, spec.precision] = Offer(**known)
        return spec

    def with_key(self, idempotency_key: str, tenant: str = tenants.DEFAULT) -> str | None:
        """As the gateway has found it when the job was specified."""
        return self._found.get(idempotency_key)

    def create(self, spec: JobSpec) -> tuple[str, bool]:
        """A job without an idempotency key gets one of its own: if the answer is lost, the next call finds the job."""
        options = dict(spec.options)
        for name in ("model", "hardware", "precision", "max_errors", "max_errors_share", "lane"):
            options[name] = getattr(spec, name)
        options |= {"drain": spec.results_high_water is not None, "ttl": spec.ttl_s}
        options["idempotency_key"] = spec.idempotency_key or f"once {secrets.token_hex(16)}"
        told = REDIS.call(lambda: self._ask("POST", "jobs", options), GatewayUnavailable, failed=RetryLimit()).fields
        return str(told["id"]), bool(told["created"])

    def create_inline(self, spec: JobSpec, value: bytes, *, digest: bytes, rows: int, token: str) -> InlineJob:
        """The job alone: its records are added step by step."""
        return InlineJob(self.create(spec)[0], rows, None)

    def add(self, job_id: str, chunk: int, value: bytes, *, digest: bytes, rows: int, token: str) -> tuple[Added, int]:
        told = self._ask("PUT", f"jobs/{job_id}/chunks/{chunk}", body=value, query={"token": token}).fields
        self.room = int(told["room"])
        return Added(told["answer"]), int(told["waiting"])

    def hold(self, job_id: str, token: str, *, lease_s: float | None = None) -> bool:
        return bool(self.step("hold", job_id, token=token, lease_s=lease_s))

    def seal(self, job_id: str, chunks: int) -> None:
        self.step("seal", job_id, chunks=chunks)

    def resume(self, job_id: str, token: str) -> bool:
        return bool(self.step("resume", job_id, token=token))

    def stop(self, job_id: str) -> None:
        self.step("stop", job_id)

    def cancel(self, job_id: str) -> JobState:
        """It also frees what was stored."""
        return JobState(self.step("cancel", job_id))

    def retry(self, job_id: str, chunk: int, new_chunk: int, token: str) -> int:
        return int(self.step("retry", job_id, chunk=chunk, new_chunk=new_chunk, token=token))

    def failed_chunks(self, job_id: str, start: int, count: int) -> list[int]:
        return list(self.step("failed_chunks", job_id, start=start, count=count))

    def chunks_with_errors(self, job_id: str, start: int, count: int) -> set[int]:
        return set(self.step("chunks_with_errors", job_id, start=start, count=count))

    def retried_as(self, job_id: str, chunk: int) -> int | None:
        found: int | None = self.step("retried_as", job_id, chunk=chunk)
        return found

    def has_result(self, job_id: str, chunk: int) -> bool:
        return bool(self.step("has_result", job_id, chunk=chunk))

    def suspects(self, job_id: str) -> list[Any]:
        """Which machines died with a chunk is for those who run them."""
        return []

    def status(self, job_id: str) -> JobStatus:
        return _status_of(self._ask("GET", f"jobs/{self.resolve(job_id)}").fields)

    def status_and_result(
        self, job_id: str, after: str | None = None, timeout_s: float = 0.0
    ) -> tuple[JobStatus, bytes | None, list[Event]]:
        events = [] if after is None else self.events(job_id, after, timeout_s)
        return self.status(job_id), None, events

    def resolve(self, job_id: str) -> str:
        if keys.is_job_id(job_id):
            return job_id
        if len(job_id) < SHORTEST:
            raise JobNotFound(f"there is no job {job_id!r}: give at least {SHORTEST} characters of an id")
        found = [job.id for job in islice(self._pages(job_id), 2)]
        if len(found) > 1:
            raise ambiguous(job_id, found)
        if not found:
            raise JobNotFound(f"there is no job {job_id!r}: no id begins or ends so; `embedctl list` shows the jobs")
        return found[0]

    def newest(self, most: int = 0) -> Iterator[JobStatus]:
        """Every job of the tenant, the newest first, read in slices."""
        return self._pages("")

    def _pages(self, shortened: str) -> Iterator[JobStatus]:
        query = {"fits": shortened}
        while True:
            told = self._ask("GET", "jobs", query=query).fields
            yield from map(_status_of, told["jobs"])
            if told["after"] is None:
                return
            query["after"] = told["after"]

    def events(self, job_id: str, after: str, timeout_s: float) -> list[Event]:
        query = {"after": after, "wait_s": f"{min(timeout_s, _WAIT_S):.3f}"}
        told = self._ask("GET", f"jobs/{job_id}/events", query=query)
        return [Event(*each) for each in told.fields["events"]]

    def discard(self, job_id: str) -> None:
        self._ask("DELETE", f"jobs/{job_id}")

    def input(self, job_id: str, chunk: int) -> bytes | None:
        return self._chunk(job_id, chunk, "input")

    def result(self, job_id: str, chunk: int) -> bytes | None:
        return self._chunk(job_id, chunk, "result")

    def result_start(self, job_id: str, chunk: int, size: int) -> bytes | None:
        return self._chunk(job_id, chunk, "result", {"size": size})

    def _chunk(self, job_id: str, chunk: int, what: str, query: Mapping[str, int] | None = None) -> bytes | None:
        found = self._ask("GET", f"jobs/{job_id}/chunks/{chunk}/{what}", query=query)
        return None if found.status == 204 else found.body

    def step(self, name: str, job_id: str, /, **fields: object) -> Any:
        """Take a step with a job, on the gateway's side; returns its answer."""
        return self._ask("POST", f"jobs/{job_id}/steps/{name}", fields).fields["answer"]


class RemoteDrains(Drains):
    """As :class:`Drains`. What is durable is for the caller to open, and the gateway keeps its name alone."""

    def __init__(self, connection: RemoteConnection, jobs: RemoteJobs) -> None:
        super().__init__(connection, jobs)
        self._step = jobs.step

    def take(
        self,
        job_id: str,
        holder: Holder,
        *,
        high_water: int,
        place: str = "",
        dead: str = "",
        lease_s: float = keys.DRAINER_LEASE_S,
    ) -> DrainState | Holder:
        given = {**dataclasses.asdict(holder), "high_water": high_water, "place": place, "dead": dead}
        told = self._step("drain", job_id, **given, lease_s=lease_s)
        return Holder(*told["holder"]) if "holder" in told else DrainState(*told["state"])

    def note(
        self,
        job_id: str,
        token: str,
        name: str,
        facts: PartFacts | BatchFacts,
        *,
        result_bytes: int,
        digests: bytes,
        more: Sequence[int] = (),
    ) -> str:
        told = {"token": token, "name": name, "facts": json.loads(facts.as_json()), "result_bytes": result_bytes}
        return str(self._step("note_drained", job_id, **told, digests=digests.hex(), more=list(more)))

    def state(self, job_id: str) -> DrainState:
        return DrainState(*self._step("drain_state", job_id)["state"])

    def unlink(self, job_id: str, chunks: Sequence[int]) -> None:
        self._step("free_drained", job_id, numbers=list(chunks))

    def is_drained(self, job_id: str, chunk: int) -> bool:
        return bool(self._step("is_drained", job_id, chunk=chunk))

    def drained_map(self, job_id: str, at: int) -> bytes:
        return bytes.fromhex(self._step("drained_map", job_id, start=8 * at))

    def noted(self, job_id: str, names: Sequence[str]) -> list[bytes | None]:
        told = self._step("drained_facts", job_id, names=list(names))
        return [None if each is None else each.encode() for each in told]


class RemoteWorkers(WorkerRegistry):
    """The workers behind a gateway: it tells what they offer, and not who they are."""

    def __init__(self, connection: RemoteConnection, jobs: RemoteJobs) -> None:
        super().__init__(connection)
        self._jobs = jobs

    def offers(self, early_s: float = 0.0) -> Mapping[Offered, Offer]:
        return self._jobs.offers

    def alive(self, queue: str | None = None) -> Iterator[Any]:
        return iter(())

    def gone(self) -> Iterator[GoneWorker]:
        return iter(())

    def starting(self, hardware: str, model: str) -> list[str]:
        return []

    def full_bytes(self) -> tuple[int, int] | None:
        return None

    def count(self, queue: str, now_ms: int | None = None) -> int:
        return sum(each.workers for (name, model, _), each in self.offers().items() if keys.queue(name, model) == queue)


class RemoteUpkeep(Upkeep):
    """The gateway looks after jobs, and frees what they leave."""

    def __init__(self, connection: RemoteConnection, settings: Settings, jobs: RemoteJobs) -> None:
        super().__init__(connection, settings, ChunkFiles())
        self._jobs = jobs

    def remove_complete(self, jobs: Sequence[JobStatus], also: Sequence[ScriptCall] = ()) -> set[str]:
        return set()

    def free(self, job_id: str, chunks: int, *, if_ended_early: bool = False) -> None:
        """Done by what ended the job."""

    def remove(self, job_id: str) -> None:
        self._jobs.discard(job_id)

    def remove_damaged(self, job_id: str) -> None:
        """Done by :meth:`remove`."""


class RemoteQuotas(Quotas):
    """The gateway counts what its tenants have."""

    def correct(self, tenant: str) -> None:
        """Done by the gateway."""


def _status_of(facts: Mapping[str, Any]) -> JobStatus:
    """A job's facts as the gateway tells them. A newer one may tell more."""
    known = {name: value for name, value in facts.items() if name in _STATUS_FIELDS}
    known |= {name: datetime.fromisoformat(known[name]) for name in _MOMENTS if known.get(name)}
    known |= {name: tuple(known[name]) for name in _TUPLES if known.get(name)}
    known |= {"state": JobState(known["state"]), "expires_in": timedelta(seconds=known["expires_in"])}
    return JobStatus(**known)

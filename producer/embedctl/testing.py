"""Answers `enqueue_embeddings()` and its kin within the process, for tests of programs: no Redis and no worker.

from embedctl import enqueue_embeddings
from embedctl.testing import answering

with answering(dimensions=384):
    vectors = enqueue_embeddings(["first text", "second text"]).vectors()

As a plugin of pytest (`pytest_plugins = ["embedctl.testing"]` in conftest.py), it has the fixture `embeddings`.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from embedctl.corpus.records import problem_of
from embedctl.jobs.enqueue import held_options
from embedctl.queueing.broker import Broker
from embedctl.remote.calls import Answer
from embedctl.store import Added, JobSpec, JobState, JobStatus
from embedctl_config import wire
from embedctl_config.errors import JobCancelled, JobNotFound, SettingsError
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.loading import load_settings
from embedctl_config.wire import ChunkInput, ChunkResult, ErrorCode, RecordError

#: Texts → float, texts × dimensions; such as `SentenceTransformer(…).encode`.
Encode = Callable[[list[str]], npt.ArrayLike]
_MODEL_FINGERPRINT = hashlib.sha256(b"embedctl.testing").hexdigest()
#: Most of a question for events that never come (seconds): another thread may end the job.
_PAUSE_S = 0.05
_ROOM_BYTES = 2**40


@contextmanager
def answering(
    *,
    dimensions: int = 8,
    encode: Encode | None = None,
    refuse: Callable[[str], str | None] | None = None,
    finishes: bool = True,
    failure: Exception | None = None,
) -> Iterator[None]:
    """Within the block, jobs of all threads of this process are answered at once and kept in memory.

    Ids, kept fields, errors, events, cancelling and discarding are as with workers. Jobs can't be retried or drained.

    Args:
        dimensions: of the vectors. Each is a hash of the prompt and the text, of unit length: equal for equal texts, in
            every process.
        encode: makes the vectors instead, float32, texts × dimensions, of texts with the prompt before them.
        refuse: gives the reason why a text fails, as `encode_error`; None for one that does not.
        finishes: if false, jobs stay queued: a wait for one raises WaitTimeout.
        failure: raised by every submission and every look at a job, such as BrokerUnavailable("Redis is away").
    """
    within = _Process(encode or (lambda texts: _hashed(texts, dimensions)), refuse, failure, finishes=finishes)
    with Broker.answered_by(within, load_settings()):
        yield


try:
    import pytest
except ModuleNotFoundError:  # the context manager needs none
    pass
else:

    def pytest_configure(config: pytest.Config) -> None:
        config.addinivalue_line("markers", "embeddings(**options): how the fixture embeddings answers, as `answering`")

    @pytest.fixture
    def embeddings(request: pytest.FixtureRequest) -> Iterator[None]:
        """Answers within the process while a test runs, as the mark `embeddings` says."""
        mark = request.node.get_closest_marker("embeddings")
        with answering(**(mark.kwargs if mark else {})):
            yield


@dataclass
class _Job:
    spec: JobSpec
    made_at: datetime
    inputs: list[bytes] = field(default_factory=list)
    results: list[bytes] = field(default_factory=list)
    with_errors: list[int] = field(default_factory=list)
    state: JobState = JobState.SUBMITTING
    sealed: bool = False
    ended_at: datetime | None = None
    records: int = 0
    failed: int = 0
    tokens: int = 0
    dim: int | None = None


class _Process:
    """Takes a gateway's place: the calls of the store of jobs, answered from memory."""

    def __init__(
        self,
        encode: Encode,
        refuse: Callable[[str], str | None] | None,
        failure: Exception | None,
        *,
        finishes: bool,
    ) -> None:
        self._encode, self._refuse, self._failure, self._finishes = encode, refuse, failure, finishes
        self._jobs: dict[str, _Job] = {}
        self._ids: dict[str, str] = {}

    def ask(
        self,
        method: str,
        path: str,
        fields: Any = None,
        *,
        body: bytes | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Answer:
        if self._failure is not None:
            raise self._failure
        _, *rest = path.split("/")
        if not rest:
            return _told(self._specified(fields) if fields.pop("dry_run", None) else self._created(fields))
        job_id, *rest = rest
        job = self._jobs.get(job_id)
        if job is None:
            raise JobNotFound(f"job {job_id} is unknown: it was discarded, or its time to live is over")
        if method == "DELETE":
            del self._jobs[job_id]
            return _told({})
        if not rest:
            return _told(self._status(job_id, job))
        if rest[0] == "events":
            time.sleep(0 if job.state.ended else min(_PAUSE_S, float(str((query or {})["wait_s"]))))
            return _told({"events": []})
        if rest[0] == "steps":
            return _told({"answer": self._step(job, rest[1], fields)})
        if method == "PUT":
            return _told({"answer": self._added(job, int(rest[1]), body or b""), "waiting": 0, "room": _ROOM_BYTES})
        stored = job.results if rest[2] == "result" else job.inputs
        if int(rest[1]) >= len(stored):
            return Answer(204, b"")
        size = int(str((query or {}).get("size", _ROOM_BYTES)))
        return Answer(200, stored[int(rest[1])][:size])

    def close(self) -> None:
        """There is no connection."""

    def _specified(self, given: dict[str, Any]) -> dict[str, Any]:
        options = held_options(given, given.pop("chunk_bytes"))
        hardware = "cpu" if given["hardware"] == "auto" else given["hardware"]
        others = {name: given[name] for name in ("idempotency_key", "max_errors", "max_errors_share", "lane")}
        spec = JobSpec(given["model"], hardware, given["precision"] or "fp32", options, given["ttl"], **others)
        return {"id": self._ids.get(spec.idempotency_key or ""), "spec": spec, "offer": None}

    def _created(self, given: dict[str, Any]) -> dict[str, Any]:
        key = given["idempotency_key"]
        if (before := self._ids.get(key)) in self._jobs:
            return {"id": before, "created": False}
        del given["drain"]  # nothing takes the results away
        now = datetime.now(UTC)
        job_id = self._ids[key] = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(5)}"
        chosen = {name: given.pop(name) for name in ("model", "hardware", "precision", "lane")}
        limits = {name: given.pop(name) for name in ("max_errors", "max_errors_share", "idempotency_key")}
        self._jobs[job_id] = _Job(JobSpec(**chosen, **limits, ttl_s=given.pop("ttl"), options=given), now)
        return {"id": job_id, "created": True}

    def _added(self, job: _Job, number: int, body: bytes) -> Added:
        if job.state is JobState.CANCELLED:
            raise JobCancelled("the job was cancelled")
        if number < len(job.inputs):
            same = wire.digest_of(job.inputs[number]) == wire.digest_of(body)
            return Added.SKIPPED if same else Added.DIFFERS
        if job.sealed:
            return Added.SEALED
        chunk = wire.decode_input(body)
        job.inputs.append(body)
        job.records += len(chunk)
        if self._finishes:
            result = self._result(job.spec, chunk, wire.digest_of(body))
            job.dim, job.failed = result.dim, job.failed + len(result.errors)
            job.tokens += sum(result.tokens or ())
            job.with_errors += [number] * bool(result.errors)
            job.results.append(wire.encode_result(result))
        return Added.OK

    def _result(self, spec: JobSpec, chunk: ChunkInput, digest: bytes) -> ChunkResult:
        problems = [self._problem(kind, text) for kind, text in zip(chunk.kinds, chunk.texts, strict=True)]
        good = [row for row, problem in enumerate(problems) if problem is None]
        texts = [(spec.options.get("prompt") or "") + chunk.texts[row].decode() for row in good]
        encoded = np.asarray(self._encode(texts or [""]), np.float32)[:, : spec.options.get("dimensions")]
        if spec.options["normalize"]:
            encoded = encoded / np.maximum(np.linalg.norm(encoded, axis=1, keepdims=True), 1e-12)
        vectors = np.full((len(chunk), encoded.shape[1]), np.nan, np.float32)
        vectors[good] = encoded[: len(good)]
        tokens = [0 if problem else len(text.split()) for problem, text in zip(problems, chunk.texts, strict=True)]
        return ChunkResult(
            first=chunk.first,
            rows=len(chunk),
            dim=vectors.shape[1],
            digest=digest,
            fingerprint=job_fingerprint(_MODEL_FINGERPRINT, spec.options),
            precision=spec.precision,
            backend="testing",
            vectors=vectors.tobytes(),
            checksums=chunk.row_checksums(),
            ids=chunk.ids,
            positions=chunk.positions,
            errors=[RecordError(row, *problem) for row, problem in enumerate(problems) if problem is not None],
            kept=chunk.kept,
            tokens=tokens if spec.options.get("count_tokens") else None,
        )

    def _problem(self, kind: int, text: bytes) -> tuple[ErrorCode, str] | None:
        problem = problem_of(kind, text)
        refused = self._refuse(text.decode()) if self._refuse and problem is None else None
        return problem if refused is None else (ErrorCode.ENCODE_ERROR, refused)

    def _step(self, job: _Job, name: str, fields: Mapping[str, Any]) -> object:
        if name in ("hold", "resume"):
            return True
        if name == "seal":
            job.sealed = True
            if self._finishes:
                job.state = JobState.COMPLETED_WITH_ERRORS if job.failed else JobState.COMPLETED
                job.ended_at = datetime.now(UTC)
            else:
                job.state = JobState.QUEUED
        elif name in ("cancel", "stop"):
            if not job.state.ended:
                job.state = JobState.CANCELLED if name == "cancel" else JobState.STOPPED
                job.ended_at = datetime.now(UTC)
        elif name == "has_result":
            return fields["chunk"] < len(job.results)
        elif name == "retried_as":
            return None
        elif name in ("failed_chunks", "chunks_with_errors"):
            asked = range(fields["start"], fields["start"] + fields["count"])
            return [chunk for chunk in job.with_errors if chunk in asked]
        else:
            raise SettingsError(f"embedctl.testing has no step {name}, and retries no records: submit them again")
        return job.state

    def _status(self, job_id: str, job: _Job) -> JobStatus:
        spec, done = job.spec, job.records - job.failed if self._finishes else 0
        return spec.as_status(
            id=job_id,
            state=job.state,
            created_at=job.made_at,
            progressed_at=job.ended_at or job.made_at,
            started_at=job.made_at if done else None,
            ended_at=job.ended_at,
            expires_in=timedelta(seconds=spec.ttl_s),
            producer_alive=True,
            sealed=job.sealed,
            records=job.records,
            done=done,
            failed=job.failed,
            tokens=job.tokens,
            chunks=len(job.inputs),
            chunks_done=len(job.results),
            original_chunks=len(job.inputs) if job.sealed else None,
            dim=job.dim,
            model_fingerprint=_MODEL_FINGERPRINT if job.results else None,
            live_workers=1,
        )


def _hashed(texts: Sequence[str], dimensions: int) -> npt.NDArray[np.float32]:
    seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big") for text in texts]
    rows = np.array([np.random.default_rng(seed).standard_normal(dimensions) for seed in seeds], np.float32)
    unit: npt.NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def _told(facts: object) -> Answer:
    return Answer(200, orjson.dumps(facts, default=lambda value: value.total_seconds()))

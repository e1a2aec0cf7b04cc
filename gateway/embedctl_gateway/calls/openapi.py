"""The calls in OpenAPI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from embedctl_config import __version__
from embedctl_gateway.access.verbs import ANY, BATCHES, EMBED, JOBS, METRICS, OPEN, READ_BATCHES, READ_JOBS, VERBS
from embedctl_gateway.calls.schemas import ID, SCHEMAS, ref
from embedctl_gateway.calls.steps import READING_STEPS, STEPS

_ID_OF_FILE = {"type": "string", "pattern": "^(file-[0-9a-f]{24})?$"}
_ID_OF_BATCH = {"type": "string", "pattern": "^(batch_[0-9a-f]{24})?$"}
_AFTER = r"^([0-9]{1,12}(\.[0-9]{1,12}\.[0-9]{1,12})?)?$"
#: Method, path, the verbs of the keys that may make it, what it does, the schemas of its body and its answer (None:
#: bytes).
CALLS: tuple[tuple[str, str, tuple[str, ...], str, str | None, str | None], ...] = (
    ("POST", "/v1/embeddings", EMBED, "Vectors, as OpenAI gives them", "EmbeddingsRequest", "Embeddings"),
    ("POST", "/pooling", EMBED, "Vectors of tokens, as vLLM gives them", "PoolingRequest", "Pooling"),
    ("GET", "/v1/models", ANY, "The models that live workers serve", None, "Models"),
    ("GET", "/v1/models/{name}", ANY, "One of them", None, "Model"),
    ("POST", "/v1/files", BATCHES, "Uploads a file, as a form (multipart/form-data)", "FileRequest", "File"),
    ("GET", "/v1/files", READ_BATCHES, "The files, the newest first", None, "Files"),
    ("GET", "/v1/files/{id}", READ_BATCHES, "One of them", None, "File"),
    ("DELETE", "/v1/files/{id}", BATCHES, "Deletes a file", None, "Deleted"),
    ("GET", "/v1/files/{id}/content", READ_BATCHES, "The bytes of a file, or a range of them", None, None),
    ("POST", "/v1/batches", BATCHES, "Answers the requests of a file", "BatchRequest", "Batch"),
    ("GET", "/v1/batches", READ_BATCHES, "The batches, the newest first", None, "Batches"),
    ("GET", "/v1/batches/{id}", READ_BATCHES, "How far a batch is", None, "Batch"),
    ("POST", "/v1/batches/{id}/cancel", BATCHES, "Ends a batch, and keeps what is done", None, "Batch"),
    (
        "GET",
        "/v1/batches/{id}/results",
        READ_BATCHES,
        "The answers so far, in the order of the requests",
        None,
        "Answers",
    ),
    ("POST", "/v1/batches/{id}/retry", BATCHES, "Makes a batch of the requests without vectors", None, "Batch"),
    ("POST", "/v1/jobs", JOBS, "Makes a job, or finds the one of its idempotency key", "JobRequest", "NewJob"),
    ("GET", "/v1/jobs", READ_JOBS, "A part of the jobs, the newest first, and what comes after it", None, "Jobs"),
    ("GET", "/v1/jobs/{id}", READ_JOBS, "How far a job is", None, "Job"),
    ("DELETE", "/v1/jobs/{id}", JOBS, "Frees a job and all that is stored for it", None, "DeletedJob"),
    ("GET", "/v1/jobs/{id}/events", READ_JOBS, "Waits for the next events of a job", None, "Events"),
    ("PUT", "/v1/jobs/{id}/chunks/{chunk}", JOBS, "Adds the next chunk of records to a job", "Chunk", "Added"),
    (
        "GET",
        "/v1/jobs/{id}/chunks/{chunk}/{what}",
        READ_JOBS,
        "The input or the result of a chunk, if it is there",
        None,
        None,
    ),
    (
        "POST",
        "/v1/jobs/{id}/steps/{step}",
        READ_JOBS,
        f"Takes a step with a job: {', '.join(STEPS)}; a key for read alone, {', '.join(READING_STEPS)}",
        "StepRequest",
        "StepAnswer",
    ),
    ("POST", "/embed", EMBED, "Vectors, as TEI gives them", "EmbedRequest", "Vectors"),
    ("POST", "/embed_sparse", EMBED, "Sparse vectors, as TEI gives them", "EmbedSparseRequest", "SparseVectors"),
    ("GET", "/info", ANY, "The model of the calls that name none, as TEI describes it", None, "Info"),
    ("POST", "/predict", EMBED, "Vectors, as HF Infinity gives them", "PredictRequest", "Vectors"),
    ("GET", "/health", OPEN, "Whether the process answers", None, "Status"),
    ("GET", "/ready", OPEN, "Whether Redis answers and a worker serves a model", None, "Status"),
    ("POST", "/", EMBED, "The same as /embed", "EmbedRequest", "Vectors"),
    ("GET", "/metrics", METRICS, "What the gateway counts, of all tenants, for Prometheus", None, "Metrics"),
    ("GET", "/openapi.json", OPEN, "These calls, for programs", None, "Description"),
    ("GET", "/docs", OPEN, "These calls, for people", None, "Page"),
)
#: The calls whose errors have TEI's form.
_TEI = ("/", "/embed", "/embed_sparse", "/info", "/predict")
#: The verbs of the keys that may make each call, by its method and its path without /v1.
MAY: Mapping[tuple[str, str], tuple[str, ...]] = {
    (method, path.removeprefix("/v1")): verbs for method, path, verbs, *_ in CALLS
}
_KEYS = f"A key has one or more verbs: {'; '.join(f'{verb}: {what}' for verb, what in VERBS.items())}."
#: The content types of what is not JSON, by schema.
_KINDS = {
    "FileRequest": "multipart/form-data",
    "Answers": "application/x-ndjson",
    "Metrics": "text/plain",
    "Page": "text/html",
    "Chunk": "application/octet-stream",
}
#: The parameters of calls that have some.
_QUERIES: Mapping[tuple[str, str], Mapping[str, dict[str, Any]]] = {
    ("GET", "/v1/files"): {
        "after": _ID_OF_FILE,
        "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
        "order": {"enum": ["asc", "desc"]},
        "purpose": {"type": "string"},
    },
    ("GET", "/v1/batches"): {
        "after": _ID_OF_BATCH,
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    },
    ("GET", "/v1/batches/{id}/results"): {"after": {"type": "string", "pattern": _AFTER}},
    ("GET", "/v1/jobs"): {
        "after": {"type": "string", "pattern": r"^[0-9]{1,15}\.[!-~]{1,255}$"},
        "fits": {"type": "string", "description": "what their ids begin or end with"},
    },
    ("GET", "/v1/jobs/{id}/events"): {
        "after": {"type": "string", "pattern": r"^([0-9]{1,15}(-[0-9]{1,19})?|\$)$"},
        "wait_s": {"type": "number", "minimum": 0, "maximum": 10},
    },
    ("PUT", "/v1/jobs/{id}/chunks/{chunk}"): {"token": {"type": "string", "pattern": "^[0-9a-f]{1,64}$"}},
    ("GET", "/v1/jobs/{id}/chunks/{chunk}/{what}"): {"size": {"type": "integer", "minimum": 1}},
}
#: The statuses that calls with a body have, and those of the others.
_STATUSES = ("400", "401", "403", "404", "408", "413", "422", "424", "429", "500", "503")
_STATUSES_OF_GET = ("401", "403", "404", "500", "503")


def document() -> dict[str, Any]:
    """The description of all calls, in OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, verbs, summary, body, answer in CALLS:
        call: dict[str, Any] = {
            "summary": summary,
            "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
            "responses": _responses(method, path, body, answer),
            # A gateway without keys needs none.
            "security": [{}, *({"key": [verb]} for verb in verbs)],
        }
        if body is not None:
            call["requestBody"] = {"required": True, **_content(body)}
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": ID} for name in re.findall(r"{(\w+)}", path)
        ]
        parameters += [
            {"name": name, "in": "query", "schema": schema} for name, schema in _QUERIES.get((method, path), {}).items()
        ]
        if parameters:
            call["parameters"] = parameters
        paths.setdefault(path, {})[method.lower()] = call
    return {
        "openapi": "3.1.0",
        "info": {"title": "embedctl gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": dict(SCHEMAS),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": _KEYS}},
        },
    }


def _responses(method: str, path: str, body: str | None, answer: str | None) -> dict[str, Any]:
    statuses: tuple[str, ...] = _STATUSES_OF_GET if body is None and (method, path) not in _QUERIES else _STATUSES
    if "{id}/" in path:
        statuses = (*_STATUSES_OF_GET, "400", *(["416"] if path.endswith("/content") else []))
    if path.startswith("/v1/jobs"):
        statuses = (*_STATUSES, "409")
    responses = {"200": _content(answer, "the answer")}
    error = _content("TeiError" if path in _TEI else "Error", "a refusal")
    responses |= dict.fromkeys(statuses, error)
    if path.endswith("/content"):
        responses["206"] = _content(None, "the range that is asked for")
    if path.endswith("/{what}"):
        responses["204"] = {"description": "it is not there, or not yet"}
    return responses


def _content(schema: str | None, description: str = "") -> dict[str, Any]:
    told = {"description": description} if description else {}
    if schema is None:
        return {**told, "content": {"application/octet-stream": {}}}
    kind = _KINDS.get(schema, "application/json")
    return {**told, "content": {kind: {"schema": ref(schema)}}}

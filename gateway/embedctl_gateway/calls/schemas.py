"""The schemas of requests and answers, and what is checked of a request by its schema."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from embedctl.corpus.batch import URLS
from embedctl.jobs.options import ONE_VECTOR, Long
from embedctl_config.outputs import Output
from embedctl_gateway.http.fields import LONGEST_PROMPT_NAME, MAX_INPUTS
from embedctl_gateway.http.refusals import refuse

#: When a file may expire, from its making (seconds).
SHORTEST_S, LONGEST_S = 3600, 2_592_000
#: The statuses of a batch.
STATUSES = ("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled")
#: Not only ASCII's white space. Workers encode any other, such as a no-break space, which `\S` leaves out.
_TEXT = {"type": "string", "pattern": r"[^\t\n\x0b\f\r ]"}
TEXTS = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}]}
_WHOLE = {"type": "integer", "minimum": 0}
_VECTOR = {"type": "array", "items": {"type": "number"}}
_MULTI_VECTOR = {"type": "array", "items": _VECTOR}


def _object(required: str, /, **properties: Any) -> dict[str, Any]:
    """An object's schema. `required` names its required fields."""
    return {"type": "object", "required": required.split(), "properties": properties}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(**schema: Any) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _list_of(name: str) -> dict[str, Any]:
    return _object(
        "object data first_id last_id has_more",
        object={"const": "list"},
        data={"type": "array", "items": ref(name)},
        first_id=_or_null(type="string"),
        last_id=_or_null(type="string"),
        has_more={"type": "boolean"},
    )


def _vectors(kind: str, field: str) -> dict[str, Any]:
    """The vectors of an answer, each an object of this kind with the numbers in this field."""
    numbers = {"anyOf": [_VECTOR, _MULTI_VECTOR, {"type": "string"}]}
    each = _object(f"object index {field}", object={"const": kind}, index=_WHOLE, **{field: numbers})
    return {"type": "array", "items": each}


_ENCODING = {"enum": ["float", "base64", None], "description": "base64: float32, little-endian"}
_USER = _or_null(type="string", description="ignored")
_MODEL_AND_USAGE = {
    "model": {"type": "string"},
    "usage": _object("prompt_tokens total_tokens", prompt_tokens=_WHOLE, total_tokens=_WHOLE),
    "embedctl": _object(
        "truncated",
        truncated={"type": "array", "items": _object("index used lost", index=_WHOLE, used=_WHOLE, lost=_WHOLE)},
    ),
}
_TRUNCATE = _or_null(type="boolean", description="encode the beginning of a text that is too long")
_SIDE = {"enum": ["right", "Right", "left", "Left", None]}
_PROMPT_NAME = _or_null(type="string", minLength=1, maxLength=LONGEST_PROMPT_NAME)
ID = {"type": "string"}
#: Clients send null for what they leave out, also for fields that are none of ours.
_NOTHING_ELSE: dict[str, Any] = {"additionalProperties": {"type": "null"}}
_TTL_S = {"type": "integer", "minimum": SHORTEST_S, "maximum": LONGEST_S}

SCHEMAS: Mapping[str, dict[str, Any]] = {
    "EmbeddingsRequest": {
        **_object(
            "model input",
            model={"type": "string", "description": "one of /v1/models"},
            input=TEXTS,
            dimensions=_or_null(type="integer", minimum=1, description="keep so many leading components"),
            encoding_format=_ENCODING,
            user=_USER,
            long={
                "enum": [*ONE_VECTOR, None],
                "description": "of a text that is too long: encode a part, refuse it, or encode all of it",
            },
        ),
        **_NOTHING_ELSE,
    },
    "Embeddings": _object(
        "object data model usage",
        object={"const": "list"},
        data=_vectors("embedding", "embedding"),
        **_MODEL_AND_USAGE,
    ),
    "PoolingRequest": {
        **_object(
            "input",
            model=_or_null(type="string", description="one of /v1/models"),
            input=TEXTS,
            task={"enum": ["token_embed", "embed", None], "description": "a vector for each token, or for each text"},
            encoding_format=_ENCODING,
            user=_USER,
            truncate_prompt_tokens={"enum": [-1, None], "description": "-1: cut a text that is too long"},
            prompt_name=_PROMPT_NAME,
            truncation_side={"enum": ["right", "left", None], "description": "which end of such a text is cut off"},
        ),
        **_NOTHING_ELSE,
    },
    "Pooling": _object(
        "id object created data model usage",
        id=ID,
        object={"const": "list"},
        created=_WHOLE,
        data=_vectors("pooling", "data"),
        **_MODEL_AND_USAGE,
    ),
    "Model": _object(
        "id object created owned_by",
        id={"type": "string"},
        object={"const": "model"},
        created=_WHOLE,
        owned_by={"type": "string"},
        embedctl=_object(
            "dimensions outputs max_tokens precision",
            dimensions=_or_null(**_WHOLE),
            outputs={"type": "array", "items": {"enum": [*Output]}},
            max_tokens=_or_null(type="integer"),
            precision={"enum": ["fp32", "fp16", "int8"]},
        ),
    ),
    "Models": _object("object data", object={"const": "list"}, data={"type": "array", "items": ref("Model")}),
    "FileRequest": {
        **_object(
            "file purpose",
            file={"type": "string", "description": "the file, at most 512 MiB"},
            purpose={"enum": ["batch"]},
            **{
                "expires_after[anchor]": {"enum": ["created_at"], "description": "only with the seconds"},
                "expires_after[seconds]": {**_TTL_S, "description": "when the file expires; 30 days by default"},
            },
        ),
        "additionalProperties": False,
        "dependentRequired": {
            "expires_after[anchor]": ["expires_after[seconds]"],
            "expires_after[seconds]": ["expires_after[anchor]"],
        },
    },
    "File": _object(
        "id object bytes created_at expires_at filename purpose status",
        id=ID,
        object={"const": "file"},
        bytes=_WHOLE,
        created_at=_WHOLE,
        expires_at=_WHOLE,
        filename={"type": "string"},
        purpose={"enum": ["batch", "batch_output"]},
        status={"const": "processed"},
        status_details={"type": "null"},
    ),
    "Files": _list_of("File"),
    "Deleted": _object("id object deleted", id=ID, object={"const": "file"}, deleted={"const": True}),
    "BatchRequest": {
        **_object(
            "input_file_id endpoint completion_window",
            input_file_id=ID,
            endpoint={"enum": [*URLS]},
            completion_window={"enum": ["24h"]},
            metadata=_or_null(
                type="object",
                propertyNames={"maxLength": 64},
                additionalProperties={"type": "string", "maxLength": 512},
                maxProperties=16,
                description="your own names and values, at most 16",
            ),
            output_expires_after=_or_null(
                **_object("anchor seconds", anchor={"enum": ["created_at"]}, seconds=_TTL_S),
                additionalProperties=False,
                description="when the files of answers expire; 30 days by default",
            ),
        ),
        **_NOTHING_ELSE,
    },
    "Batch": _object(
        "id object endpoint input_file_id completion_window status created_at expires_at request_counts",
        id=ID,
        object={"const": "batch"},
        endpoint={"type": "string"},
        model=_or_null(type="string"),
        errors=_or_null(type="object"),
        input_file_id=ID,
        completion_window={"type": "string"},
        status={"enum": [*STATUSES]},
        output_file_id=_or_null(type="string"),
        error_file_id=_or_null(type="string"),
        created_at=_WHOLE,
        expires_at=_WHOLE,
        request_counts=_object("total completed failed", total=_WHOLE, completed=_WHOLE, failed=_WHOLE),
        metadata=_or_null(type="object"),
        usage={"type": "object"},
        embedctl=_object("retry_of", retry_of=ID),
    ),
    "Batches": _list_of("Batch"),
    "Answers": {"type": "string", "description": "a JSON object on each line"},
    "Metrics": {"type": "string", "description": "as Prometheus reads them"},
    "Page": {"type": "string"},
    "Description": {"type": "object"},
    "JobRequest": {
        **_object(
            "",
            model=_or_null(type="string", description="one of /v1/models"),
            hardware=_or_null(type="string", description="a hardware class, or auto"),
            precision=_or_null(type="string"),
            prompt=_or_null(type="string"),
            prompt_name=_or_null(type="string"),
            long=_or_null(type="string", description=", ".join(get_args(Long))),
            normalize=_or_null(type="boolean", description="true by default"),
            dimensions=_or_null(type="integer", minimum=1),
            vectors=_or_null(
                type="array", items={"type": "string"}, description=f"what to make of a text: {', '.join(Output)}"
            ),
            dims_anyway=_or_null(type="boolean", description="cut vectors of any model"),
            chunk_size=_or_null(type="integer", minimum=1, description="most records in a chunk"),
            chunk_bytes=_or_null(type="integer", minimum=1, description="most text in a chunk"),
            ttl=_or_null(type="number", minimum=1, description="seconds to keep the job after its end"),
            idempotency_key=_or_null(type="string", description="a second call with it finds the job"),
            max_errors=_or_null(type="integer", minimum=0, description="more failed records end the job"),
            max_errors_share=_or_null(type="number", minimum=0, maximum=1, description="the same, as a share"),
            keep=_or_null(type="array", items={"type": "string"}, description="the names of the kept fields"),
            column_types=_or_null(
                type="object",
                additionalProperties={"type": "string"},
                description="what the columns of a corpus in parquet are",
            ),
            count_tokens=_or_null(type="boolean"),
            batch_file=_or_null(type="boolean", description="it is made of a batch file"),
            digests=_or_null(type="boolean"),
            tenant=_or_null(type="string", description="no other than the key's"),
            lane=_or_null(type="string", description="interactive, normal or background"),
            drain=_or_null(type="boolean", description="its results leave Redis as the caller takes them"),
            dry_run=_or_null(type="boolean", description="make no job; tell what it would be"),
        ),
        **_NOTHING_ELSE,
    },
    "NewJob": _object("id created", id=_or_null(type="string"), created={"type": "boolean"}),
    "Job": _object(
        "id state model records done failed",
        id=ID,
        state={"type": "string"},
        model={"type": "string"},
        records=_WHOLE,
        done=_WHOLE,
        failed=_WHOLE,
    ),
    "Jobs": _object("jobs after", jobs={"type": "array", "items": {"type": "object"}}, after=_or_null(type="string")),
    "DeletedJob": _object("id deleted", id=ID, deleted={"const": True}),
    "Events": _object("events", events={"type": "array"}),
    "Chunk": {"type": "string", "format": "binary", "description": "records, in the library's own format"},
    "Added": _object("answer waiting room", answer={"type": "string"}, waiting=_WHOLE, room=_WHOLE),
    "StepRequest": {
        **_object(
            "",
            token=_or_null(type="string", description="names the producer"),
            lease_s=_or_null(type="number", description="0 gives the producer's right up"),
            chunks=_or_null(**_WHOLE),
            chunk=_or_null(**_WHOLE),
            new_chunk=_or_null(**_WHOLE),
            start=_or_null(**_WHOLE),
            count=_or_null(**_WHOLE),
            machine=_or_null(type="string", description="this and the next two tell who drains"),
            process=_or_null(type="string"),
            host=_or_null(type="string"),
            high_water=_or_null(**_WHOLE),
            place=_or_null(type="string", description="where the vectors go"),
            dead=_or_null(type="string", description="the token of a drainer that died"),
            name=_or_null(type="string", description="of a part"),
            facts=_or_null(type="object", description="of a part"),
            result_bytes=_or_null(**_WHOLE),
            digests=_or_null(type="string", description="of the chunks' inputs, in hexadecimal"),
            more=_or_null(type="array", items=_WHOLE),
            numbers=_or_null(type="array", items=_WHOLE),
            names=_or_null(type="array", items={"type": "string"}),
        ),
        **_NOTHING_ELSE,
    },
    "StepAnswer": _object("answer", answer={}),
    "EmbedRequest": {
        **_object(
            "inputs",
            inputs=TEXTS,
            normalize=_or_null(type="boolean", description="true by default"),
            truncate=_TRUNCATE,
            truncation_direction=_SIDE,
            prompt_name=_PROMPT_NAME,
            dimensions=_or_null(type="integer", minimum=1),
        ),
        **_NOTHING_ELSE,
    },
    "EmbedSparseRequest": {
        **_object(
            "inputs",
            inputs=TEXTS,
            truncate=_TRUNCATE,
            truncation_direction=_SIDE,
            prompt_name=_PROMPT_NAME,
        ),
        **_NOTHING_ELSE,
    },
    "PredictRequest": {**_object("inputs", inputs=TEXTS), **_NOTHING_ELSE},
    "Vectors": {"type": "array", "items": _VECTOR},
    "SparseVectors": {
        "type": "array",
        "items": {"type": "array", "items": _object("index value", index=_WHOLE, value={"type": "number"})},
    },
    "Info": _object("model_id max_input_length max_client_batch_size version", model_id={"type": "string"}),
    "Status": _object("status", status={"type": "string"}),
    "Error": _object(
        "error",
        error=_object(
            "message type param code",
            message={"type": "string"},
            type={"type": "string"},
            param=_or_null(type="string"),
            code=_or_null(type="string"),
        ),
    ),
    "TeiError": _object(
        "error error_type",
        error={"type": "string"},
        error_type={"enum": ["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]},
    ),
}

_TYPES: Mapping[str, Any] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": int | float,
    "array": list,
    "object": dict,
}


def check_known(fields: Mapping[str, Any], schema: str) -> None:
    """Refuse a field that the schema of a request does not have, and that would be ignored, unless it is null."""
    for name, value in fields.items():
        if name not in SCHEMAS[schema]["properties"] and value is not None:
            refuse(f"{name[:100]} is not a field of this call: leave it out", "unsupported_parameter", name[:100])


def check_types(fields: Mapping[str, Any], schema: str) -> None:
    """Refuse a value that is not of the type, or not in the bounds, that the schema of a request gives its field."""
    for name, value in fields.items():
        facts = SCHEMAS[schema]["properties"].get(name)
        if value is None or facts is None:
            continue
        kind = facts["type"][0]
        is_right = isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")
        if not is_right or not all(isinstance(each, str) for each in _inside(value)):
            refuse(f"{name} is no {kind}", "invalid_type", name)
        least, most = facts.get("minimum", -math.inf), facts.get("maximum", math.inf)
        if isinstance(value, int | float) and not least <= value <= most:
            refuse(f"{name} is out of its bounds", "invalid_value", name)


def _inside(value: Any) -> Iterable[Any]:
    """The elements of an array or the values of an object; nothing is in any other value."""
    return value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()

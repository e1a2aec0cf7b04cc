"""OpenAI's calls: embeddings and models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from starlette.responses import JSONResponse, Response

from embedctl.destinations.answers import as_base64, as_floats
from embedctl.jobs.options import ONE_VECTOR
from embedctl.waiting.results import Vectors
from embedctl_gateway.calls.common import ROWS, Call, answered
from embedctl_gateway.calls.openapi import check_known
from embedctl_gateway.embedding.catalogue import Served
from embedctl_gateway.embedding.embedder import Asked, Embedded
from embedctl_gateway.http.fields import dimensions_of, texts_of
from embedctl_gateway.http.refusals import refuse

#: When this gateway was started, which is when its models were "created".
_STARTED = int(time.time())


async def embeddings(call: Call) -> Response:
    fields = await call.fields(embeds=True)
    asked = _asked(fields)
    numbers = as_base64 if fields.get("encoding_format") == "base64" else as_floats
    del fields
    return await answered(_lines(asked, await call.embed(asked), numbers), len(asked.texts))


async def models(call: Call) -> Response:
    served = await call.gateway.catalogue.served()
    data = [_model(each) for each in served.values() if not each.spelling_of]
    return JSONResponse({"object": "list", "data": data})


async def model(call: Call) -> Response:
    return JSONResponse(_model(await call.gateway.catalogue.find(call.request.path_params["name"])))


def _asked(fields: Mapping[str, Any]) -> Asked:
    check_known(fields, "EmbeddingsRequest")
    if "input" not in fields:
        refuse("no input: give a text, or an array of texts", "missing_required_parameter", "input")
    name = fields.get("model")
    if name is None:
        refuse("no model: give the name of one of /v1/models", "missing_required_parameter", "model")
    if not isinstance(name, str):
        refuse("model is not the name of one", "invalid_type", "model")
    if fields.get("encoding_format") not in (None, "float", "base64"):
        refuse("encoding_format is neither float nor base64", "invalid_value", "encoding_format")
    if not isinstance(fields.get("user"), str | None):
        refuse("user is not a string", "invalid_type", "user")
    long: Any = "cut" if fields.get("long") is None else fields["long"]
    if long not in ONE_VECTOR:
        refuse(f"long is none of {', '.join(ONE_VECTOR)}", "invalid_value", "long")
    return Asked(texts_of(fields["input"], "input"), name, dimensions_of(fields), long)


async def _lines(asked: Asked, embedded: Embedded, numbers: Callable[[Vectors], bytes]) -> AsyncIterator[bytes]:
    yield b'{"object":"list","data":['
    for at in range(0, len(embedded.vectors), ROWS):
        rows = enumerate(embedded.vectors[at : at + ROWS], at)
        yield (b"," if at else b"") + b",".join(
            b'{"object":"embedding","index":%d,"embedding":%b}' % (index, numbers(row)) for index, row in rows
        )
    told: dict[str, Any] = {
        "model": asked.model,
        "usage": {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens},
    }
    if embedded.truncations:
        cut = [{"index": each.position, "used": each.used, "lost": each.lost} for each in embedded.truncations]
        told["embedctl"] = {"truncated": cut}
    yield b"]," + orjson.dumps(told)[1:]


def _model(served: Served) -> dict[str, Any]:
    facts = {
        "dimensions": served.dim or None,  # a sparse model has none
        "outputs": [*served.outputs],
        "max_tokens": served.max_tokens or None,
        "precision": served.precision,
    }
    return {"id": served.name, "object": "model", "created": _STARTED, "owned_by": "embedctl", "embedctl": facts}

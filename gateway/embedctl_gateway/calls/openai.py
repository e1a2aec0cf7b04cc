"""The calls in OpenAI's form: embeddings and models; and vLLM's call that has vectors of a kind."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from embedctl.destinations.answers import EMBEDDING, POOLING, as_base64, as_floats, in_list
from embedctl.jobs.options import ONE_VECTOR, Long
from embedctl_config.outputs import Output
from embedctl_gateway.calls.common import Call, answered
from embedctl_gateway.calls.schemas import check_known
from embedctl_gateway.embedding.catalogue import Served
from embedctl_gateway.embedding.embedder import Asked
from embedctl_gateway.http.fields import dimensions_of, prompt_name_of, texts_of, whole
from embedctl_gateway.http.refusals import refuse

#: When this gateway was started, which is when its models were "created".
_STARTED = int(time.time())
#: vLLM's tasks.
_TASKS = {None: Output.MULTI, "token_embed": Output.MULTI, "embed": Output.DENSE}
#: Of a text that is too long, the end is kept that this names.
_SIDES: Mapping[object, Long] = {None: "cut", "right": "cut-right", "left": "cut-left"}


async def embeddings(call: Call) -> Response:
    """OpenAI's call. A model that gives multi-vectors alone has a list of vectors for each text, as at infinity."""
    fields = await call.fields(embeds=True)
    check_known(fields, "EmbeddingsRequest")
    if fields.get("model") is None:
        refuse("no model: give the name of one of /v1/models", "missing_required_parameter", "model")
    long: Any = "cut" if fields.get("long") is None else fields["long"]
    if long not in ONE_VECTOR:
        refuse(f"long is none of {', '.join(ONE_VECTOR)}", "invalid_value", "long")
    return await _answer(call, fields, EMBEDDING, long, (Output.DENSE, Output.MULTI))


async def pooling(call: Call) -> Response:
    """vLLM's `POST /pooling`: a vector for each token, or with the task `embed` one for each text."""
    fields = await call.fields(embeds=True)
    check_known(fields, "PoolingRequest")
    task, side, most = (fields.get(name) for name in ("task", "truncation_side", "truncate_prompt_tokens"))
    if not isinstance(task, str | None) or task not in _TASKS:
        refuse("task is neither token_embed nor embed; /embed_sparse has sparse vectors", "invalid_value", "task")
    if not isinstance(side, str | None) or side not in _SIDES:
        refuse("truncation_side is neither left nor right", "invalid_value", "truncation_side")
    if most is not None and whole(most) != -1:
        refuse(
            "truncate_prompt_tokens is not -1, which cuts a text to as many tokens as the model takes",
            "invalid_value",
            "truncate_prompt_tokens",
        )
    return await _answer(call, fields, POOLING, "error" if most is None else _SIDES[side], (_TASKS[task],))


async def models(call: Call) -> Response:
    served = await call.gateway.catalogue.served()
    data = [_model(each) for each in served.values() if not each.spelling_of]
    return JSONResponse({"object": "list", "data": data})


async def model(call: Call) -> Response:
    return JSONResponse(_model(await call.gateway.catalogue.find(call.request.path_params["name"])))


async def _answer(
    call: Call, fields: Mapping[str, Any], before: bytes, long: Long, outputs: tuple[Output, ...]
) -> Response:
    if "input" not in fields:
        refuse("no input: give a text, or an array of texts", "missing_required_parameter", "input")
    if not isinstance(fields.get("model"), str | None):
        refuse("model is not the name of one", "invalid_type", "model")
    if fields.get("encoding_format") not in (None, "float", "base64"):
        refuse("encoding_format is neither float nor base64", "invalid_value", "encoding_format")
    if not isinstance(fields.get("user"), str | None):
        refuse("user is not a string", "invalid_type", "user")
    numbers = as_base64 if fields.get("encoding_format") == "base64" else as_floats
    texts = texts_of(fields["input"], "input")
    embedded = await call.embed(
        Asked(
            texts,
            fields.get("model"),
            dimensions_of(fields),
            long,
            prompt_name=prompt_name_of(fields),
            outputs=outputs,
        )
    )
    told: dict[str, Any] = {
        "model": embedded.model,
        "usage": {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens},
    }
    if before is POOLING:
        told |= {"id": f"pool-{secrets.token_hex(12)}", "created": int(time.time())}
    if embedded.truncations:
        cut = [{"index": each.position, "used": each.used, "lost": each.lost} for each in embedded.truncations]
        told["embedctl"] = {"truncated": cut}
    return answered(in_list(before, map(numbers, embedded.vectors), told))


def _model(served: Served) -> dict[str, Any]:
    facts = {
        "dimensions": served.dim or None,  # a sparse model has none
        "outputs": [*served.outputs],
        "max_tokens": served.max_tokens or None,
        "precision": served.precision,
    }
    return {"id": served.name, "object": "model", "created": _STARTED, "owned_by": "embedctl", "embedctl": facts}

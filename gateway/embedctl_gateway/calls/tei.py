"""The calls of TEI (Text Embeddings Inference) and of HF Infinity, which have an array of vectors as their answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from typing import Any

import orjson
from starlette.responses import JSONResponse, Response

from embedctl.destinations.answers import as_floats
from embedctl.jobs.options import Long
from embedctl.waiting.shapes import SparseVectors
from embedctl_config import __version__
from embedctl_config.outputs import Output
from embedctl_gateway.calls.common import MAX_TOKENS, ROWS, Call, answered
from embedctl_gateway.calls.openapi import check_known
from embedctl_gateway.embedding.embedder import Asked, Embedded
from embedctl_gateway.http.fields import LONGEST_PROMPT_NAME, MAX_INPUTS, dimensions_of, texts_of
from embedctl_gateway.http.refusals import refuse

#: TEI's clients write directions in either way.
_CUTS: Mapping[object, Long] = {
    None: "cut",
    **dict.fromkeys(("right", "Right"), "cut-right"),
    **dict.fromkeys(("left", "Left"), "cut-left"),
}
#: So many weights of sparse vectors take about as long to write as a dense vector.
_WEIGHTS_OF_ROW = 50


async def embed(call: Call) -> Response:
    return await _answer(call, "EmbedRequest", Output.DENSE)


async def embed_sparse(call: Call) -> Response:
    return await _answer(call, "EmbedSparseRequest", Output.SPARSE)


async def _answer(call: Call, schema: str, output: Output) -> Response:
    began = time.perf_counter()
    fields = await call.fields(embeds=True)
    asked = _asked(fields, schema, output)
    del fields
    embedded = await call.embed(asked)
    ms = f"{(time.perf_counter() - began) * 1000:.0f}"
    headers = {
        "x-compute-type": "embedctl",
        "x-compute-time": ms,
        "x-total-time": ms,
        "x-compute-characters": str(sum(map(len, asked.texts))),
        "x-compute-tokens": str(embedded.tokens),
    }
    if embedded.sparse is None:
        return await answered(_array(embedded), len(asked.texts), headers)
    rows = max(len(asked.texts), len(embedded.sparse.indices) // _WEIGHTS_OF_ROW)
    return await answered(_sparse_array(embedded.sparse), rows, headers)


async def predict(call: Call) -> Response:
    """HF Infinity's `POST /predict`; `x-compute-time` is in milliseconds."""
    began = time.perf_counter()
    fields = await call.fields(embeds=True)
    check_known(fields, "PredictRequest")
    asked = Asked(_inputs(fields))
    del fields
    embedded = await call.embed(asked)
    took = {"x-compute-time": f"{(time.perf_counter() - began) * 1000:.2f}"}
    return await answered(_array(embedded), len(asked.texts), took)


async def info(call: Call) -> Response:
    """TEI's `GET /info`, about the model of calls that name none."""
    served = await call.gateway.catalogue.find(None)
    return JSONResponse(
        {
            "model_id": served.name,
            "model_sha": None,
            "model_dtype": {"fp32": "float32", "fp16": "float16"}.get(served.precision, served.precision),
            "model_type": {"embedding": {"pooling": "mean"}},
            "max_concurrent_requests": call.gateway.settings.limits.gateway_in_flight,
            "max_input_length": served.max_tokens,
            "max_batch_tokens": MAX_TOKENS,
            "max_client_batch_size": MAX_INPUTS,
            "auto_truncate": False,
            "version": __version__,
        }
    )


def _asked(fields: Mapping[str, Any], schema: str, output: Output) -> Asked:
    check_known(fields, schema)
    side, prompt_name = fields.get("truncation_direction"), fields.get("prompt_name")
    if not isinstance(side, str | None) or side not in _CUTS:
        refuse("truncation_direction is neither left nor right", "invalid_value", "truncation_direction")
    if not isinstance(prompt_name, str | None) or len(prompt_name or "a") > LONGEST_PROMPT_NAME or prompt_name == "":
        refuse(f"prompt_name is no name of 1 to {LONGEST_PROMPT_NAME} characters", "invalid_value", "prompt_name")
    truncate, normalize = (_flag(fields, "truncate", otherwise=False), _flag(fields, "normalize", otherwise=True))
    return Asked(
        _inputs(fields),
        None,
        dimensions_of(fields),
        _CUTS[side] if truncate else "error",
        normalize=normalize,
        prompt_name=prompt_name,
        output=output,
    )


def _inputs(fields: Mapping[str, Any]) -> list[str]:
    if "inputs" not in fields:
        refuse("no inputs: give a text, or an array of texts", "missing_required_parameter", "inputs")
    return texts_of(fields["inputs"], "inputs")


def _flag(fields: Mapping[str, Any], name: str, *, otherwise: bool) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        refuse(f"{name} is neither true nor false", "invalid_type", name)
    return otherwise if value is None else value


async def _array(embedded: Embedded) -> AsyncIterator[bytes]:
    yield b"["
    for at in range(0, len(embedded.vectors), ROWS):
        yield (b"," if at else b"") + b",".join(as_floats(row) for row in embedded.vectors[at : at + ROWS])
    yield b"]"


async def _sparse_array(found: SparseVectors) -> AsyncIterator[bytes]:
    yield b"["
    starts = found.starts.tolist()
    for row, (first, end) in enumerate(pairwise(starts)):
        pairs = zip(found.indices[first:end].tolist(), found.weights[first:end], strict=True)
        line = [{"index": index, "value": weight} for index, weight in pairs]
        yield (b"," if row else b"") + orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)  # float32, as it is
    yield b"]"

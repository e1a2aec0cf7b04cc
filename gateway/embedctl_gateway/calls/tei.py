"""The calls of TEI (Text Embeddings Inference) and of HF Infinity, which have an array of vectors as their answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from embedctl.destinations.answers import as_floats, as_pairs, in_array
from embedctl.jobs.options import Long
from embedctl_config import __version__
from embedctl_config.outputs import Output
from embedctl_gateway.calls.common import MAX_TOKENS, Call, answered
from embedctl_gateway.calls.schemas import check_known
from embedctl_gateway.embedding.embedder import Asked
from embedctl_gateway.http.fields import MAX_INPUTS, dimensions_of, prompt_name_of, texts_of
from embedctl_gateway.http.refusals import refuse

#: TEI's clients write directions in either way.
_CUTS: Mapping[object, Long] = {
    None: "cut",
    **dict.fromkeys(("right", "Right"), "cut-right"),
    **dict.fromkeys(("left", "Left"), "cut-left"),
}


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
    numbers: Callable[[Any], Iterable[bytes]] = as_pairs if output is Output.SPARSE else as_floats
    return answered(in_array(map(numbers, embedded.vectors)), headers)


async def predict(call: Call) -> Response:
    """HF Infinity's `POST /predict`; `x-compute-time` is in milliseconds."""
    began = time.perf_counter()
    fields = await call.fields(embeds=True)
    check_known(fields, "PredictRequest")
    asked = Asked(_inputs(fields))
    del fields
    embedded = await call.embed(asked)
    took = {"x-compute-time": f"{(time.perf_counter() - began) * 1000:.2f}"}
    return answered(in_array(map(as_floats, embedded.vectors)), took)


async def info(call: Call) -> Response:
    """TEI's `GET /info`, about the model of calls that name none."""
    served = await call.gateway.catalogue.find(None)
    return JSONResponse(
        {
            "model_id": served.name,
            "model_sha": None,
            "model_dtype": {"fp32": "float32", "fp16": "float16"}.get(served.precision, served.precision),
            "model_type": {"embedding": {"pooling": served.pooling or None}},
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
    side = fields.get("truncation_direction")
    if not isinstance(side, str | None) or side not in _CUTS:
        refuse("truncation_direction is neither left nor right", "invalid_value", "truncation_direction")
    truncate, normalize = (_flag(fields, "truncate", otherwise=False), _flag(fields, "normalize", otherwise=True))
    return Asked(
        _inputs(fields),
        None,
        dimensions_of(fields),
        _CUTS[side] if truncate else "error",
        normalize=normalize,
        prompt_name=prompt_name_of(fields),
        outputs=(output,),
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

"""Checks a job's options against what the live workers offer."""

from __future__ import annotations

import math

from embedctl.jobs.options import Kept, SubmitOptions, is_whole
from embedctl.queueing.broker import Broker
from embedctl.queueing.chunk_sizes import BYTES_PER_TOKEN
from embedctl.store.quotas import larger_than_kept
from embedctl.store.scripts import KEPT_PART
from embedctl.store.workers import Offer
from embedctl_config.errors import SettingsError
from embedctl_config.model_names import not_matryoshka, unknown_prompt
from embedctl_config.outputs import Output, not_given

#: Largest size of a chunk's vectors (bytes): the largest value in Redis, less room for ids and errors.
MAX_VECTOR_BYTES = 448 * 1024 * 1024
#: The vectors of a chunk of at most this many records are always smaller than that.
_SMALL_CHUNK = 1024
#: The width of multi-vectors where no live worker tells it: that of the widest models.
_MULTI_WIDTH = 1024
#: Of a dense vector, the dimensions where no live worker tells them, and what is around it (bytes).
_DIM, _PER_ROW = 1024, 64
#: Of any record in a result, what is around its vectors and fields, with its part of what is around the chunk (bytes).
_AROUND = 24
#: A token of short words has no fewer bytes.
_PER_TOKEN = 2
#: Most dimensions that a job may ask for: several times those of any model.
MAX_DIMENSIONS = 65_536


def check_against_workers(broker: Broker, options: SubmitOptions, model: str, hardware: str) -> None:
    """Refuse what the live workers of a class are known to lack. If none is alive to tell, every record will fail
    instead. The options name a chunk size."""
    name, dimensions, chunk_size = options.prompt_name, options.dimensions, options.chunk_size or 0
    if dimensions is not None and not (is_whole(dimensions) and 1 <= dimensions <= MAX_DIMENSIONS):
        raise SettingsError(f"dimensions {dimensions!r} is not a whole number between 1 and {MAX_DIMENSIONS}")
    if name is None and dimensions is None and options.vectors is None and chunk_size <= _SMALL_CHUNK:
        return
    served = _served(broker, model, hardware)
    for offer in served:
        if why := not_given(options.outputs, offer.outputs, model):
            raise SettingsError(why)
        if name is not None and offer.prompts is not None and name not in offer.prompts:
            raise SettingsError(f"prompt_name {name!r}: {unknown_prompt(model, offer.prompts)}")
        if dimensions is not None and dimensions > offer.dim:
            raise SettingsError(f"dimensions {dimensions} is more than the {offer.dim} that vectors of {model} have")
        if dimensions not in (None, offer.dim) and not (offer.matryoshka or options.dims_anyway):
            raise SettingsError(not_matryoshka(model))
    dim = dimensions or max((offer.dim for offer in served), default=0)
    if chunk_size * dim * 4 > MAX_VECTOR_BYTES:
        raise SettingsError(
            f"chunk_size {chunk_size}: the vectors of a chunk, of {dim} dimensions each, would not fit into one value "
            f"of Redis. With this model, the largest chunk_size is {MAX_VECTOR_BYTES // (dim * 4)}"
        )


def most_chunk_bytes(broker: Broker, options: SubmitOptions, model: str, hardware: str) -> int:
    """The most text of a chunk (bytes): the setting, and so little that multi-vectors fit into one value of Redis even
    if each byte is a token."""
    if Output.MULTI not in options.outputs:
        return broker.settings.chunk_bytes
    width = max((offer.multi_width for offer in _served(broker, model, hardware)), default=0) or _MULTI_WIDTH
    return min(broker.settings.chunk_bytes, MAX_VECTOR_BYTES // (4 * width))


def keeps(broker: Broker, options: SubmitOptions, model: str, hardware: str, precision: str) -> str:
    """What `sums.lua` is told of a gateway's job, whose bytes count for its tenant; nothing if they do not. Raises
    QuotaExceeded, which is final, if they are known to be more than a tenant may keep; tokens are reckoned from the
    length of texts."""
    if (kept := options.kept) is None:
        return ""
    served, most = _served(broker, model, hardware), broker.kept_most()
    row = byte = 0
    if Output.DENSE in options.outputs:
        row += _PER_ROW + 4 * (options.dimensions or max((offer.dim for offer in served), default=0) or _DIM)
    if Output.SPARSE in options.outputs:
        byte += 8 // _PER_TOKEN
    if Output.MULTI in options.outputs:
        width = max((offer.multi_width for offer in served), default=0) or _MULTI_WIDTH
        byte += 4 * width // _PER_TOKEN
    whole = max((_whole(kept, options, offer, 2 if precision == "fp16" else 4) for offer in served), default=0)
    if kept.beside + whole > most * KEPT_PART:
        raise larger_than_kept(options.tenant or "", kept.beside + whole, most)
    return f"{most} {row * kept.times} {byte * kept.times} {kept.times} {whole} {kept.beside}"


def _whole(kept: Kept, options: SubmitOptions, offer: Offer, number: int) -> int:
    """What a job counts when all of it is encoded, as far as that is known beforehand; its dense vectors have numbers
    of so many bytes."""
    size = float(kept.records * _AROUND + kept.field_bytes)
    if Output.DENSE in options.outputs:
        size += kept.records * number * (options.dimensions or offer.dim)
    if Output.MULTI in options.outputs:
        tokens = min(kept.text_bytes / BYTES_PER_TOKEN, kept.records * offer.max_tokens)
        size += 4 * offer.multi_width * tokens
    return math.ceil(kept.times * size)


def _served(broker: Broker, model: str, hardware: str) -> list[Offer]:
    return [offer for offered, offer in broker.workers.offers().items() if offered[:2] == (hardware, model)]

"""Checks of a job's options. Each raises :class:`SettingsError` with what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedctl.corpus.records import kind_of
from embedctl.queueing.broker import Broker
from embedctl_config.errors import SettingsError
from embedctl_config.model_names import unknown_prompt

if TYPE_CHECKING:
    from embedctl.jobs.options import SubmitOptions

#: Largest size of a chunk's vectors (bytes): the largest value in Redis, less room for ids and errors.
MAX_VECTOR_BYTES = 448 * 1024 * 1024
#: The vectors of a chunk of at most this many records are always smaller than that.
_SMALL_CHUNK = 1024
#: Most dimensions that a job may ask for: several times those of any model.
MAX_DIMENSIONS = 65_536
#: The longest name of a prompt (bytes).
MAX_PROMPT_NAME = 200


def is_whole(value: object) -> bool:
    """Whether a value is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_length(name: str, text: str | None, most: int) -> None:
    """Refuse a value that is not text or too long, because it is stored with the job."""
    if not isinstance(text, str | None):
        raise SettingsError(f"{name} is {kind_of(text)}, not a string")
    try:
        size = len((text or "").encode())
    except UnicodeEncodeError:
        raise SettingsError(f"{name} is not valid UTF-8") from None
    if size > most:
        raise SettingsError(f"{name} is {size:,} bytes long, and the maximum is {most:,}: shorten it")


def check_prompt_name(name: str | None, prompt: str | None) -> None:
    """Refuse a name that can be none, and a name beside a prompt."""
    check_length("prompt_name", name, MAX_PROMPT_NAME)
    if name == "":
        raise SettingsError("prompt_name is empty: name one of the model's prompts, or leave it out")
    if name is not None and prompt is not None:
        raise SettingsError("prompt and prompt_name would both be put before the text: leave one of them out")


def check_against_workers(broker: Broker, options: SubmitOptions, model: str, hardware: str) -> None:
    """Refuse what the live workers of a class are known to lack. If none is alive to tell, every record will fail
    instead. The options name a chunk size."""
    name, dimensions, chunk_size = options.prompt_name, options.dimensions, options.chunk_size or 0
    if dimensions is not None and not (is_whole(dimensions) and 1 <= dimensions <= MAX_DIMENSIONS):
        raise SettingsError(f"dimensions {dimensions!r} is not a whole number between 1 and {MAX_DIMENSIONS}")
    if name is None and dimensions is None and chunk_size <= _SMALL_CHUNK:
        return
    served = [offer for offered, offer in broker.workers.offers().items() if offered[:2] == (hardware, model)]
    for offer in served:
        if name is not None and offer.prompts is not None and name not in offer.prompts:
            raise SettingsError(f"prompt_name {name!r}: {unknown_prompt(model, offer.prompts)}")
        if dimensions is not None and dimensions > offer.dim:
            raise SettingsError(f"dimensions {dimensions} is more than the {offer.dim} that vectors of {model} have")
    dim = dimensions or max((offer.dim for offer in served), default=0)
    if chunk_size * dim * 4 > MAX_VECTOR_BYTES:
        raise SettingsError(
            f"chunk_size {chunk_size}: the vectors of a chunk, of {dim} dimensions each, would not fit into one value "
            f"of Redis. With this model, the largest chunk_size is {MAX_VECTOR_BYTES // (dim * 4)}"
        )

"""The fields of requests that all calls for vectors have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embedctl.corpus.records import kind_of
from embedctl.jobs.options import MAX_PROMPT_NAME
from embedctl_gateway.http.refusals import refuse

#: Most texts of a request, as at OpenAI.
MAX_INPUTS = 2048
#: The longest name of a prompt that surely has no more bytes than the library takes (characters).
LONGEST_PROMPT_NAME = MAX_PROMPT_NAME // 4

_IDS_OF_TOKENS = (
    "{name} holds token ids, and this gateway takes texts: ids of another model's tokenizer would give wrong vectors. "
    "With LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False"
)


def texts_of(given: object, name: str) -> list[str]:
    """The texts of a request's field: a string, or an array of strings. Raises Refusal if it is neither, has none, one
    of them is empty, or there are too many."""
    texts: list[Any] = given if isinstance(given, list) else [given]
    # First: ids may be more than there may be texts.
    if isinstance(given, list) and any(map(_are_token_ids, given[:MAX_INPUTS])):
        refuse(_IDS_OF_TOKENS.format(name=name), "invalid_type", name)
    if not 1 <= len(texts) <= MAX_INPUTS:
        status = 413 if len(texts) > MAX_INPUTS else 400
        code = "too_many_inputs" if texts else "empty_input"
        refuse(f"{name} has {len(texts):,} texts; a request has 1 to {MAX_INPUTS:,}", code, name, status)
    for index, text in enumerate(texts):
        where = f"{name}[{index}]" if isinstance(given, list) else name
        if not isinstance(text, str):
            refuse(f"{where} is {kind_of(text)}, not a string", "invalid_type", name)
        if not text:
            refuse(f"{where} is an empty string", "empty_input", name)
    return texts


def _are_token_ids(given: object) -> bool:
    return type(given) is int or (isinstance(given, list) and all(type(each) is int for each in given))


def dimensions_of(fields: Mapping[str, Any]) -> int | None:
    given = fields.get("dimensions")
    dimensions = whole(given)
    if given is not None and (dimensions is None or dimensions < 1):
        refuse("dimensions is not a whole number from 1 on", "invalid_value", "dimensions")
    return dimensions


def prompt_name_of(fields: Mapping[str, Any]) -> str | None:
    name = fields.get("prompt_name")
    if not isinstance(name, str | None) or len(name or "a") > LONGEST_PROMPT_NAME or name == "":
        refuse(f"prompt_name is no name of 1 to {LONGEST_PROMPT_NAME} characters", "invalid_value", "prompt_name")
    return name


def digits_of(given: str, most: int) -> int | None:
    """A whole number up to `most` (below 10**18) that is written in digits; None if it is none."""
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):  # Python converts no endless digits
        return None
    number = int(given)
    return number if number <= most else None


def whole(given: object) -> int | None:
    """A whole number, which JSON may write as 8, 8.0 or 8e0; None if it is none."""
    if type(given) is int:
        return given
    return int(given) if isinstance(given, float) and given.is_integer() else None

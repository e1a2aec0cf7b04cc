"""Reads from a tokenizer's JSON whether it is one that can be compiled, and what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NORMALIZER = {"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"}
_MODEL = {"type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"}
_MOST_IDS = 2**31


class NotSupported(Exception):
    """Raised when a tokenizer is not one that can be compiled; says why."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a WordPiece tokenizer does with a text."""

    lowercase: bool  #: whether the case of letters is ignored
    vocabulary: Mapping[str, int]  #: piece → id
    prefix: str  #: what a piece that continues a word begins with
    longest: int  #: a word of more characters is unknown
    unknown: int  #: the id of a word that has no pieces
    #: ids before and behind each text
    before: Sequence[int]
    after: Sequence[int]
    added: Sequence[str]  #: contents of the tokens that are found in a text before it is cut into words


def rules_of(tokenizer: Mapping[str, Any]) -> Rules:
    """The rules of a tokenizer without truncation and padding, of the JSON that the library writes.

    NotSupported if some part of it is, or may be, of another kind.
    """
    normalizer, model = tokenizer["normalizer"], tokenizer["model"]
    _check(normalizer and normalizer["type"] == "BertNormalizer" and normalizer.keys() == _NORMALIZER, "its normalizer")
    _check(tokenizer["pre_tokenizer"] == {"type": "BertPreTokenizer"}, "its pre-tokenizer")
    _check(model["type"] == "WordPiece" and model.keys() == _MODEL, "its model")
    _check(all(0 <= each < _MOST_IDS for each in model["vocab"].values()), "its ids")
    _check(model["unk_token"] in model["vocab"], "its vocabulary lacks the unknown token")
    _check(model["max_input_chars_per_word"] >= 1, "its longest word")
    _check(tokenizer["truncation"] is None and tokenizer["padding"] is None, "its truncation or padding")
    before, after = _around(tokenizer["post_processor"])
    return Rules(
        lowercase=normalizer["lowercase"],
        vocabulary=model["vocab"],
        prefix=model["continuing_subword_prefix"],
        longest=model["max_input_chars_per_word"],
        unknown=model["vocab"][model["unk_token"]],
        before=before,
        after=after,
        added=[_content(token) for token in tokenizer["added_tokens"]],
    )


def _content(token: Mapping[str, Any]) -> str:
    """An added token's content, without which no word of printable ASCII can hold the token.

    Without white space, it lies within one word between white space. It begins with punctuation, so letters and digits
    need no look.
    """
    content: str = token["content"]
    visible = content.isascii() and content.isprintable() and " " not in content
    _check(content and visible and not content[0].isalnum(), f"its added token {content!r}")
    return content


def _around(processor: Mapping[str, Any] | None) -> tuple[Sequence[int], Sequence[int]]:
    """The ids before and behind a text. All token types must be 0."""
    kind = processor and processor["type"]
    if processor and kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][1]], [processor["sep"][1]]
    _check(kind == "TemplateProcessing", "its post-processor")
    assert processor is not None
    before: list[int] = []
    after: list[int] = []
    sequences = 0
    for part in processor["single"]:
        ((what, value),) = part.items()
        _check(value["type_id"] == 0, "its token types")
        if what == "Sequence":
            sequences += 1
        else:
            (after if sequences else before).extend(processor["special_tokens"][value["id"]]["ids"])
    _check(sequences == 1, "its template")
    return before, after


def _check(right: object, what: str) -> None:
    if not right:
        raise NotSupported(what)

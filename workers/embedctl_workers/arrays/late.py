"""Prepares documents and queries for models of late interaction, as MultiVectorEncoder and PyLate do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from embedctl_config.errors import ModelError
from embedctl_workers.arrays.tokenizing import TextTokenizer
from embedctl_workers.arrays.tokens import SCORED, Query, Ragged, Side, Tokens


@dataclass(frozen=True, slots=True)
class LateRules:
    """What such a model says of its texts, in types of JSON."""

    query: str  #: the prompt of a query
    document: str
    skipped: list[int]  #: tokens that have no vector in the texts of `skips`, of `query` and `document`
    skips: list[str]
    longest_query: int  #: most tokens of a text, special ones included
    longest_document: int
    expansion: int  #: tokens that a query has at least; 0: it is not expanded
    attend: bool  #: whether the others attend to the tokens that expand a query
    filler: int  #: the token that queries are expanded by

    @classmethod
    def of(cls, model: Any, longest: int) -> Self:
        """Those of a loaded MultiVectorEncoder that takes so many tokens; a ModelError if it scores only some tokens of
        a document."""
        mask: Any = next((each for each in model if hasattr(each, "skiplist_tasks")), None)
        if mask is not None and mask.keep_only_token_ids:
            raise ModelError("the model scores only some tokens of a document, as models for images do")
        expansion = (model[0].query_expansion if mask is not None else None) or {}
        longest_query = model[0].query_length or longest
        if expansion:
            fixed, length = expansion["strategy"] == "fixed", expansion["length"]
            longest_query = length if fixed else max(longest_query, length)
        skipped = getattr(mask, "_skiplist_ids", None)
        return cls(
            query=model.prompts.get("query") or "",
            document=model.prompts.get("document") or "",
            skipped=[] if skipped is None else skipped.tolist(),
            skips=[] if mask is None else list(mask.skiplist_tasks),
            longest_query=min(longest_query, longest),
            longest_document=min(model[0].document_length or longest, longest),
            expansion=expansion.get("length", 0),
            attend=bool(expansion.get("attend", True)),
            filler=_filler(model.tokenizer, expansion),
        )


class LateTexts:
    """Tokenises documents, and queries if their prompt is a :class:`Query`, into these columns.

    A document's tokens are scored but for those of the skip list. A query may be expanded by tokens up to a length;
    they are scored, and the others attend to them only if the model says so: else there is a column for attention.

    Attributes:
        prompts: those of a query and of a document.
        attends: whether no query needs a column for attention.
    """

    def __init__(self, rules: LateRules, tokenizer: Tokenizer, columns: Sequence[str], keep: Side) -> None:
        self._rules = rules
        self.attends = rules.attend
        self._documents, self._queries = (
            TextTokenizer(tokenizer, max_tokens=longest, columns=columns, keep=keep)
            for longest in (rules.longest_document, rules.longest_query)
        )
        self.prompts: Mapping[str, str] = {"query": Query(rules.query), "document": rules.document}

    def __call__(self, texts: Sequence[str], prompt: str | None, side: Side | None) -> Tokens:
        prompt = self.prompts["document"] if prompt is None else prompt
        is_query = isinstance(prompt, Query)
        tokens = (self._queries if is_query else self._documents)([prompt + text for text in texts], side)
        ids = tokens.columns["input_ids"]
        skips = ("query" if is_query else "document") in self._rules.skips
        scored = ~np.isin(ids.values, self._rules.skipped) if skips else np.ones(len(ids.values), bool)
        columns = {**tokens.columns, SCORED: Ragged(scored.astype(np.int32), ids.offsets)}
        tokens = replace(tokens, columns=columns, windows=None)
        return self._expanded(tokens) if is_query and self._rules.expansion else tokens

    def _expanded(self, tokens: Tokens) -> Tokens:
        lengths = np.maximum(tokens.lengths, self._rules.expansion)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        real = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) < np.repeat(tokens.lengths, lengths)
        columns = {}
        for name, column in tokens.columns.items():
            values = np.full(len(real), {"input_ids": self._rules.filler, SCORED: 1}.get(name, 0), column.values.dtype)
            values[real] = column.values
            columns[name] = Ragged(values, offsets)
        if not self._rules.attend:
            columns["attention_mask"] = Ragged(real.astype(np.int32), offsets)
        return replace(tokens, lengths=lengths, columns=columns)


def _filler(tokenizer: Any, expansion: Mapping[str, Any]) -> int:
    if expansion.get("token") is not None:
        return int(tokenizer.convert_tokens_to_ids(expansion["token"]))
    found = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    return int(found or 0)

"""Prepares documents and queries for models of late interaction, as MultiVectorEncoder and PyLate do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from embedctl_config.errors import ModelError
from embedctl_workers.arrays.tokenizing import TextTokenizer
from embedctl_workers.arrays.tokens import SCORED, Query, Ragged, Rows, Side, Tokens

if TYPE_CHECKING:
    from embedctl_workers.backends.torch.kept import TextRules


class LateTexts:
    """Tokenises documents, and queries if their prompt is a :class:`Query`.

    A document's tokens are scored but for those of the skip list. A query may be expanded by tokens up to a length;
    they are scored, and the others attend to them only if the model says so: else there is a column for attention.

    Attributes:
        prompts: those of a query and of a document.
        aside: whether queries need a column for attention.
    """

    def __init__(self, model: Any, rules: TextRules) -> None:
        first: Any = model[0]
        mask: Any = next((each for each in model if hasattr(each, "skiplist_tasks")), None)
        if mask is not None and mask.keep_only_token_ids:
            raise ModelError("the model scores only some tokens of a document, as models for images do")
        skipped = getattr(mask, "_skiplist_ids", None)
        self._skipped: Rows = np.zeros(0, np.int64) if skipped is None else skipped.numpy()
        self._skips: Sequence[str] = mask.skiplist_tasks if mask is not None else ()
        self._expansion: Any = first.query_expansion if mask is not None else None
        self.aside = self._expansion is not None and not self._expansion["attend"]
        self._filler = _filler(model.tokenizer, self._expansion)
        self.max_tokens = min(first.document_length or rules.max_tokens, rules.max_tokens)
        longest = first.query_length or rules.max_tokens
        if self._expansion is not None:
            length = self._expansion["length"]
            longest = length if self._expansion["strategy"] == "fixed" else max(longest, length)
        tokenizer = Tokenizer.from_str(rules.tokenizer)
        columns = rules.columns
        self._documents = TextTokenizer(tokenizer, max_tokens=self.max_tokens, columns=columns, keep=rules.keep)
        self._queries = TextTokenizer(
            tokenizer, max_tokens=min(longest, rules.max_tokens), columns=columns, keep=rules.keep
        )
        named = model.prompts
        self.prompts: Mapping[str, str] = {
            "query": Query(named.get("query") or ""),
            "document": named.get("document") or "",
        }

    def __call__(self, texts: Sequence[str], prompt: str | None, side: Side | None) -> Tokens:
        prompt = self.prompts["document"] if prompt is None else prompt
        is_query = isinstance(prompt, Query)
        tokens = (self._queries if is_query else self._documents)([prompt + text for text in texts], side)
        ids = tokens.columns["input_ids"]
        skips = ("query" if is_query else "document") in self._skips
        scored = ~np.isin(ids.values, self._skipped) if skips else np.ones(len(ids.values), bool)
        columns = {**tokens.columns, SCORED: Ragged(scored.astype(np.int32), ids.offsets)}
        tokens = replace(tokens, columns=columns, windows=None)
        return self._expanded(tokens) if is_query and self._expansion is not None else tokens

    def _expanded(self, tokens: Tokens) -> Tokens:
        lengths = np.maximum(tokens.lengths, self._expansion["length"])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        real = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) < np.repeat(tokens.lengths, lengths)
        columns = {}
        for name, column in tokens.columns.items():
            values = np.full(len(real), {"input_ids": self._filler, SCORED: 1}.get(name, 0), column.values.dtype)
            values[real] = column.values
            columns[name] = Ragged(values, offsets)
        if self.aside:
            columns["attention_mask"] = Ragged(real.astype(np.int32), offsets)
        return replace(tokens, lengths=lengths, columns=columns)


def _filler(tokenizer: Any, expansion: Mapping[str, Any] | None) -> int:
    """The token that queries are expanded by."""
    if expansion is not None and expansion["token"] is not None:
        return int(tokenizer.convert_tokens_to_ids(expansion["token"]))
    found = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    return int(found or 0)

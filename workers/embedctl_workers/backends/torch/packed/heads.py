"""What makes sparse vectors and multi-vectors of the last hidden states of packed tokens, as sentence-transformers does
on padded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pickle import UnpicklingError
from typing import Any, Protocol, Self

import numpy as np
import torch
from tokenizers import Tokenizer

from embedctl_config.errors import ModelError
from embedctl_config.outputs import Output
from embedctl_workers.arrays.outputs import (
    Column,
    TokenVectors,
    cells_of_weights,
    largest_weights,
    scored_in,
    token_vectors,
)
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.models.deciding import BESIDE
from embedctl_workers.models.files import ModelFiles

#: The words whose logits are computed at once, so that those of a text of 512 tokens stay in a cache of 2 MiB; and the
#: tokens of a block.
_WORDS, _BLOCK = 1024, 1024


class Head(Protocol):
    """Makes one output of hidden states, float32, tokens × hidden."""

    width: int  #: of the output, as in :attr:`~embedctl_workers.backends.base.Backend.widths`

    def __call__(self, states: Vectors, tokens: Tokens, rows: Rows) -> Column | TokenVectors: ...

    def numbers(self, states: torch.Tensor, text: torch.Tensor, texts: int) -> torch.Tensor:
        """On any device, what :func:`~embedctl_workers.arrays.outputs.computed_of` takes of so many texts; `text`
        tells of each token which one it belongs to."""


class Splade(torch.nn.Module):
    """Weights of words by SPLADE: the logits of a masked language model, the largest or the sum over a text's tokens.

    `transform` is what that model does before its product with the words by `decoder`. The largest logit has the
    largest weight, so weights are computed of it alone. The logits of all words are never in memory at once. A weight
    is the logarithm of 1 + the logit, so many times (`logs`).
    """

    def __init__(self, transform: torch.nn.Sequential, decoder: torch.nn.Linear, *, sums: bool, logs: int) -> None:
        super().__init__()
        self._transform, self._decoder = transform, decoder
        self._sums, self._logs, self.width = sums, logs, decoder.out_features

    @classmethod
    def of(cls, model: Any) -> Self:
        """That of a SparseEncoder."""
        mlm, pooling = model[0].auto_model, model[1]
        logs = 2 if pooling.activation_function == "log1p_relu" else 1
        return cls(*mlm_head(mlm), sums=pooling.pooling_strategy == "sum", logs=logs)

    @classmethod
    def read(cls, table: Callable[[str], Vectors], facts: Mapping[str, Any]) -> Self:
        """What :meth:`facts` was kept of; `table` gives weights by name."""
        dense, norm, decoder = (
            {part: torch.from_numpy(table(name)) for part, name in names.items()} for names in facts["names"]
        )
        after = torch.nn.LayerNorm(len(norm["weight"]), facts["eps"])
        after.load_state_dict(norm, assign=True)
        transform = torch.nn.Sequential(_linear(dense), torch.nn.GELU(), after)
        return cls(transform, _linear(decoder), sums=facts["sums"], logs=facts["logs"])

    def facts(self, names: Mapping[int, str]) -> dict[str, Any]:
        """What :meth:`read` makes this of, if its activation is GELU. `names` of weights are by their places."""
        dense, _, norm = self._transform
        parts = [
            {part: names[getattr(module, part).data_ptr()] for part in ("weight", "bias")}
            for module in (dense, norm, self._decoder)
        ]
        return {"names": parts, "eps": norm.eps, "sums": self._sums, "logs": self._logs}

    @torch.inference_mode()
    def __call__(self, states: Vectors, tokens: Tokens, rows: Rows) -> Column:
        transformed = self._transform(torch.from_numpy(states))
        offsets = np.concatenate([[0], np.cumsum(tokens.lengths[rows])])
        found: list[np.ndarray[Any, Any]] = []
        while len(found) < len(offsets) - 1:
            first = len(found)
            last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _BLOCK, side="right")) - 1)
            begin, end = int(offsets[first]), int(offsets[last])
            found += self._block(transformed[begin:end], (offsets[first : last + 1] - begin).tolist())
        return found

    def _block(self, states: torch.Tensor, offsets: list[int]) -> Column:
        texts, reduce = list(pairwise(offsets)), torch.sum if self._sums else torch.amax
        whole = torch.empty(len(texts), self.width)
        for words, logits in self._logits(states):
            for row, (begin, end) in enumerate(texts):
                reduce(logits[begin:end], 0, out=whole[row, words])
        return cells_of_weights(self._reduced(whole).numpy())

    def numbers(self, states: torch.Tensor, text: torch.Tensor, texts: int) -> torch.Tensor:
        whole, text = states.new_zeros(texts, self.width), text.long()
        for words, logits in self._logits(self._transform(states)):
            if self._sums:
                whole[:, words] = whole[:, words].index_add(0, text, logits)
            else:
                of_words = text[:, None].expand_as(logits)
                whole[:, words] = whole[:, words].scatter_reduce(0, of_words, logits, "amax", include_self=False)
        return self._reduced(whole)

    def _logits(self, transformed: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Of each block of words, what is to be reduced over the tokens of a text: logits, or weights for a sum."""
        for at in range(0, self.width, _WORDS):
            words = slice(at, min(at + _WORDS, self.width))
            logits = transformed @ self._decoder.weight[words].T
            yield words, self._weights(logits.add_(self._decoder.bias[words])) if self._sums else logits

    def _reduced(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self._sums else self._weights(whole.add_(self._decoder.bias))

    def _weights(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.relu_()
        for _ in range(self._logs):
            logits = logits.log1p_()
        return logits


class Lexical(torch.nn.Module):
    """bge-m3's weights of the tokens themselves: of a token that occurs several times, the largest one."""

    def __init__(self, linear: torch.nn.Linear, width: int, unused: Sequence[int]) -> None:
        super().__init__()
        self._linear, self.width = linear, width
        self.unused = unused  #: tokens that never have a weight

    @torch.inference_mode()
    def __call__(self, states: Vectors, tokens: Tokens, rows: Rows) -> Column:
        weights = self.of_tokens(torch.from_numpy(states)).numpy()
        return largest_weights(weights, tokens.columns["input_ids"].select(rows), self.unused)

    def of_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """… × hidden → …"""
        return torch.relu(self._linear(states)).squeeze(-1)

    def numbers(self, states: torch.Tensor, text: torch.Tensor, texts: int) -> torch.Tensor:
        return self.of_tokens(states)


class Projection(torch.nn.Module):
    """The vectors of a text's tokens, each through the same modules: of the tokens that are scored, or of all but the
    first if texts do not say."""

    def __init__(self, of_tokens: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.of_tokens, self.width = of_tokens, width

    @torch.inference_mode()
    def __call__(self, states: Vectors, tokens: Tokens, rows: Rows) -> TokenVectors:
        scored = scored_in(tokens, rows)
        vectors: Vectors = self.of_tokens(torch.from_numpy(states[scored])).float().numpy()
        return token_vectors(vectors, scored, tokens.lengths[rows])

    def numbers(self, states: torch.Tensor, text: torch.Tensor, texts: int) -> torch.Tensor:
        vectors: torch.Tensor = self.of_tokens(states)
        return vectors


def unused_of(heads: Mapping[Output, Any]) -> Sequence[int]:
    """The tokens that never have a weight."""
    return next((head.unused for head in heads.values() if isinstance(head, Lexical)), ())


def as_they_are(widths: Mapping[Output, int]) -> dict[Output, Head]:
    """The heads of a model that runs its own modules alone: vectors of tokens that need nothing more."""
    return {each: Projection(torch.nn.Identity(), width) for each, width in widths.items() if each == Output.MULTI}


def mlm_head(model: Any) -> tuple[torch.nn.Sequential, torch.nn.Linear]:
    """What a masked language model of the BERT family does after its encoder: a transform, and a product with words."""
    if hasattr(model, "cls"):
        head = model.cls.predictions
        parts = head.transform.dense, head.transform.transform_act_fn, head.transform.LayerNorm
        return torch.nn.Sequential(*parts), head.decoder
    if hasattr(model, "vocab_projector"):
        transform = torch.nn.Sequential(model.vocab_transform, model.activation, model.vocab_layer_norm)
        return transform, model.vocab_projector
    head = model.lm_head
    return torch.nn.Sequential(head.dense, torch.nn.GELU(), head.layer_norm), head.decoder


def heads_beside(files: ModelFiles, tokenizer: Tokenizer) -> dict[Output, Lexical | Projection]:
    """The heads that a model has beside its dense vectors, as bge-m3 does, in their order; a ModelError if one can't be
    read."""
    found: dict[Output, Lexical | Projection] = {}
    if Output.DENSE not in files.outputs:
        return found
    if Output.SPARSE in files.outputs:
        ids = map(tokenizer.token_to_id, ("<s>", "</s>", "<pad>", "<unk>"))
        unused = [each for each in ids if each is not None]
        found[Output.SPARSE] = Lexical(_beside(files, Output.SPARSE), tokenizer.get_vocab_size(), unused)
    if Output.MULTI in files.outputs:
        linear = _beside(files, Output.MULTI)
        found[Output.MULTI] = Projection(linear, linear.out_features)
    return found


def _beside(files: ModelFiles, output: Output) -> torch.nn.Linear:
    path = files.folder / BESIDE[output]
    try:
        return _linear(torch.load(path, map_location="cpu", weights_only=True))  # no code in it is run
    except (OSError, RuntimeError, KeyError, TypeError, UnpicklingError) as error:
        raise ModelError(f"{path} can't be read: {error!r}") from error


def _linear(weights: Mapping[str, torch.Tensor]) -> torch.nn.Linear:
    outputs, inputs = weights["weight"].shape
    linear = torch.nn.Linear(inputs, outputs, device="meta")  # not filled with random numbers
    linear.load_state_dict(weights, assign=True)
    return linear.float().requires_grad_(False)

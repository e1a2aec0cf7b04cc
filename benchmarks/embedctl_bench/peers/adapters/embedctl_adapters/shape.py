"""The operations that an encoder needs for texts, by its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Encoders of one design: attention with four square matrices, then a feed-forward of two. Model type → the names of
#: hidden size, inner size, number of layers and of heads in its configuration.
_BERT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_KNOWN: Mapping[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "mpnet"), _BERT),
    "distilbert": ("dim", "hidden_dim", "n_layers", "n_heads"),
}


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes of an encoder of the BERT family: `layers` layers, `hidden` wide, with a feed-forward `inner` wide."""

    hidden: int
    inner: int
    layers: int
    heads: int

    def flop(self, lengths: Sequence[int]) -> float:
        """Operations for texts of these lengths (tokens): multiplications and additions of matrix products.

        The weights cost 2 × layers × (4 × hidden² + 2 × hidden × inner) per token: a matrix of n weights is n
        multiplications and n additions per token, and a layer has query, key, value, output and the two matrices of
        the feed-forward. Attention costs 4 × layers × hidden × length per token: every token meets every token of its
        text, twice. Kaplan et al. count in this way (Scaling Laws for Neural Language Models, table 1, with both
        directions of attention). Padding, embeddings, pooling and all that is not a matrix product are not counted.
        """
        weights = 2 * self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.inner)
        tokens = np.array(lengths, float)
        return float(weights * tokens.sum() + 4 * self.layers * self.hidden * (tokens**2).sum())


def shape_of(folder: Path) -> EncoderShape:
    """The shape of the model in a folder; RuntimeError if its architecture is unknown here."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") not in _KNOWN:
        raise RuntimeError("the model is of an unknown shape")
    return EncoderShape(*(config[name] for name in _KNOWN[config["model_type"]]))

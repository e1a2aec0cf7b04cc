"""The weights of encoders that can run on packed tokens, read from transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BertModel,
    CamembertModel,
    DistilBertModel,
    PreTrainedModel,
    RobertaModel,
    XLMRobertaModel,
)
from transformers.activations import ACT2FN


@dataclass(frozen=True, slots=True)
class Layer:
    """One encoder layer: attention, then feed-forward, each added to its input and normalised (post-norm)."""

    query: torch.nn.Linear
    key: torch.nn.Linear
    value: torch.nn.Linear
    out: torch.nn.Linear
    attention_norm: torch.nn.LayerNorm
    up: torch.nn.Linear
    down: torch.nn.Linear
    norm: torch.nn.LayerNorm


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a packed encoder."""

    words: torch.Tensor  #: float32, vocabulary × hidden
    #: float32, positions × hidden; includes the embedding of token type 0, the type of every token of a single text, if
    #: the model has token types
    places: torch.Tensor
    norm: torch.nn.LayerNorm  #: applied to the sum of both
    layers: list[Layer]
    heads: int
    #: the padding token's id for RoBERTa, which numbers positions from this id + 1 and skips padding tokens, even
    #: inside a text; None: positions are 0, 1, 2, …
    padding_id: int | None
    activation: Callable[[torch.Tensor], torch.Tensor] | None  #: of the feed-forward; None: exact GELU


def weights_of(model: PreTrainedModel) -> Weights | None:
    """The weights of an encoder of the BERT family; None for any other model.

    Subclasses count as other models, because their additions are unknown here.
    """
    if type(model) in (BertModel, RobertaModel, XLMRobertaModel, CamembertModel):
        return None if model.config.is_decoder or model.config.add_cross_attention else _bert(model)
    if type(model) is DistilBertModel:
        return _distilbert(model)
    return None


def _bert(model: Any) -> Weights:
    tables = model.embeddings
    return Weights(
        words=_table(tables.word_embeddings),
        places=_table(tables.position_embeddings) + _table(tables.token_type_embeddings)[0],
        norm=tables.LayerNorm,
        layers=[
            Layer(
                query=layer.attention.self.query,
                key=layer.attention.self.key,
                value=layer.attention.self.value,
                out=layer.attention.output.dense,
                attention_norm=layer.attention.output.LayerNorm,
                up=layer.intermediate.dense,
                down=layer.output.dense,
                norm=layer.output.LayerNorm,
            )
            for layer in model.encoder.layer
        ],
        heads=model.config.num_attention_heads,
        padding_id=None if type(model) is BertModel else int(tables.padding_idx),
        activation=_activation(model.config.hidden_act),
    )


def _distilbert(model: Any) -> Weights:
    tables = model.embeddings
    return Weights(
        words=_table(tables.word_embeddings),
        places=_table(tables.position_embeddings),
        norm=tables.LayerNorm,
        layers=[
            Layer(
                query=layer.attention.q_lin,
                key=layer.attention.k_lin,
                value=layer.attention.v_lin,
                out=layer.attention.out_lin,
                attention_norm=layer.sa_layer_norm,
                up=layer.ffn.lin1,
                down=layer.ffn.lin2,
                norm=layer.output_layer_norm,
            )
            for layer in model.transformer.layer
        ],
        heads=model.config.n_heads,
        padding_id=None,
        activation=_activation(model.config.activation),
    )


def _table(embedding: torch.nn.Embedding) -> torch.Tensor:
    return embedding.weight.detach().float().contiguous()


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    function: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[name]
    return None if name == "gelu" else function

"""Which models that sentence-transformers has loaded can run on packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from sentence_transformers.sparse_encoder.modules import MLMTransformer
from transformers import (
    BertModel,
    CamembertModel,
    DistilBertModel,
    PreTrainedModel,
    RobertaModel,
    XLMRobertaModel,
)
from transformers.activations import ACT2FN

from embedctl_config.outputs import Output
from embedctl_workers.arrays.tokens import Rows, Vectors
from embedctl_workers.backends.torch.loading import FirstDimensions, modules_of
from embedctl_workers.backends.torch.packed.heads import Head, Projection, Splade
from embedctl_workers.backends.torch.packed.modules import Rest
from embedctl_workers.backends.torch.packed.weights import Floats, Layer, Part, Weights

#: The modules that can follow packed tokens.
_PACKED = (Pooling, Normalize, Dense, FirstDimensions)


def packable(model: Any) -> tuple[Weights, list[torch.nn.Module]] | None:
    """The weights of a model of the BERT family, and the modules that turn tokens' vectors into a text's vector.

    None for any other model. The modules are the model's own. They recognise packed tokens by `cu_seq_lens_q`. A model
    that :func:`heads_of` has heads of has none.
    """
    transformer: Any
    transformer, *rest = model
    plain = isinstance(model, SentenceTransformer)
    if type(transformer) not in (Transformer, MLMTransformer):
        return None
    if plain and (not all(type(each) in _PACKED for each in rest) or transformer.query_expansion is not None):
        return None
    if not hasattr(Pooling, "_forward_flattened"):
        return None
    if any(transformer.tokenizer.backend_tokenizer.encode("a").type_ids):
        return None
    weights = weights_of(transformer.auto_model if plain else transformer.auto_model.base_model)
    return None if weights is None else (weights, rest if plain else [])


def heads_of(model: Any) -> dict[Output, Head]:
    """The heads of a SparseEncoder or a MultiVectorEncoder; none for another model."""
    if isinstance(model, SparseEncoder):
        return {Output.SPARSE: Splade.of(model)}
    if isinstance(model, MultiVectorEncoder):
        return {Output.MULTI: Projection(_OnTokens(modules_of(model)[1:]), int(model.get_embedding_dimension() or 0))}
    return {}


class _OnTokens(torch.nn.ModuleList):
    """Modules that make vectors of tokens of their states, in turn."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        features = {"token_embeddings": states}
        for module in self:
            features = module(features)
        return features["token_embeddings"]


def take_layers(model: Any, weights: Weights) -> None:
    """Leave the weights of the layers to the packed engine: those of the model are empty then."""
    parts = [getattr(layer, each.name) for layer in weights.layers for each in fields(Layer)]
    taken = {values.ctypes.data for part in parts for values in (part.weight, part.bias)}
    for parameter in model.parameters():
        if parameter.data_ptr() in taken:
            parameter.data = parameter.data.new_empty(0)


def rest_of(modules: Sequence[Any]) -> Rest:
    """What a model's own modules make of the vectors of packed tokens."""

    def rest(vectors: Vectors, offsets: Rows, prompt_tokens: int | None) -> Vectors:
        features: dict[str, Any] = {
            "token_embeddings": torch.from_numpy(vectors)[None],
            "cu_seq_lens_q": torch.from_numpy(offsets),
        }
        if prompt_tokens is not None:
            features["prompt_length"] = prompt_tokens
        with torch.inference_mode():
            for module in modules:
                features = module(features)
        found: Vectors = features["sentence_embedding"].numpy()
        return found

    return rest


def weights_of(model: PreTrainedModel) -> Weights | None:
    """The weights of an encoder of the BERT family, perhaps in the model's own memory; None for any other model.

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
        norm=_part(tables.LayerNorm),
        layers=[
            Layer(
                query=_part(layer.attention.self.query),
                key=_part(layer.attention.self.key),
                value=_part(layer.attention.self.value),
                out=_part(layer.attention.output.dense),
                attention_norm=_part(layer.attention.output.LayerNorm),
                up=_part(layer.intermediate.dense),
                down=_part(layer.output.dense),
                norm=_part(layer.output.LayerNorm),
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
        norm=_part(tables.LayerNorm),
        layers=[
            Layer(
                query=_part(layer.attention.q_lin),
                key=_part(layer.attention.k_lin),
                value=_part(layer.attention.v_lin),
                out=_part(layer.attention.out_lin),
                attention_norm=_part(layer.sa_layer_norm),
                up=_part(layer.ffn.lin1),
                down=_part(layer.ffn.lin2),
                norm=_part(layer.output_layer_norm),
            )
            for layer in model.transformer.layer
        ],
        heads=model.config.n_heads,
        padding_id=None,
        activation=_activation(model.config.activation),
    )


def _table(embedding: torch.nn.Embedding) -> Floats:
    return _floats(embedding.weight)


def _part(module: Any) -> Part:
    return Part(_floats(module.weight), _floats(module.bias), getattr(module, "eps", 0.0))


def _floats(values: torch.Tensor) -> Floats:
    found: Floats = values.detach().float().contiguous().numpy()
    return found


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    function: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[name]
    return None if name == "gelu" else function

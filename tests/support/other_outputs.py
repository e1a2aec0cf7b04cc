"""Small models for sparse vectors and multi-vectors, saved by sentence-transformers' own classes."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder.modules import SpladePooling

from tests.support.tiny_models import Tiny, fill, make_model


def make_sparse(folder: Path, tiny: Tiny, **pooling: Any) -> Path:
    """A SPLADE model of a family, with random weights."""
    base = make_model(folder / "base", tiny)
    model = transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.from_pretrained(base))
    fill(model, tiny.seed)
    model.save_pretrained(base)
    first = Transformer(str(base), transformer_task="fill-mask", max_seq_length=tiny.max_seq_length)
    saved = SparseEncoder(modules=[first, SpladePooling(**pooling)], prompts={"query": "w1 ", "document": ""})
    saved.save(str(folder / "model"))
    return folder / "model"


def make_three(folder: Path, tiny: Tiny) -> Path:
    """A dense model with bge-m3's two heads beside it, of random weights."""
    made = make_model(folder, tiny)
    torch.manual_seed(1)
    for name, width in (("sparse", 1), ("colbert", 24)):
        torch.save(torch.nn.Linear(tiny.hidden, width).state_dict(), made / f"{name}_linear.pt")
    return made


def make_multi(folder: Path, tiny: Tiny, *, attend: bool = False, strategy: str = "fixed", **first: Any) -> Path:
    """A ColBERT model of a family, with random weights: markers, punctuation that is skipped, expanded queries."""
    base = make_model(folder / "base", tiny)
    expansion = {"strategy": strategy, "attend": attend, "length": 12}
    transformer = Transformer(str(base), max_seq_length=tiny.max_seq_length, query_expansion=expansion, **first)
    torch.manual_seed(tiny.seed)
    dense = Dense(
        tiny.hidden, 16, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"
    )
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    modules = [transformer, dense, mask, Normalize(module_input_name="token_embeddings")]
    saved = MultiVectorEncoder(modules=modules, prompts={"query": "w1 ", "document": "w2 "})
    saved.save(str(folder / "model"))
    return folder / "model"

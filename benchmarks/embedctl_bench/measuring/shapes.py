"""Models of published benchmarks by their shape: random weights, with the vocabulary of a model that is installed.

A model's speed depends on its shape, not on its weights. The vectors of these models mean nothing, and are compared
with those of torch on the same weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from embedctl_config.settings import Settings
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.files import resolve_model

#: The longest text of all of them (tokens).
MAX_TOKENS = 512
#: The model that gives the vocabulary.
_VOCABULARY = "all-MiniLM-L6-v2"
#: Larger than BERT's 0.02, because random layers with 0.02 give almost the same vector for every text.
_INITIALIZER_RANGE = 0.05


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The facts that determine a model's speed. `hidden` is also the size of its vectors."""

    family: Literal["bert", "distilbert"]
    layers: int
    hidden: int
    heads: int
    pooling: Literal["mean", "cls"]


SHAPES = {
    "bge-small-shape": ModelShape("bert", layers=12, hidden=384, heads=12, pooling="cls"),
    "bge-base-shape": ModelShape("bert", layers=12, hidden=768, heads=12, pooling="cls"),
    "bge-large-shape": ModelShape("bert", layers=24, hidden=1024, heads=16, pooling="cls"),
    "distilbert-shape": ModelShape("distilbert", layers=6, hidden=768, heads=12, pooling="mean"),
}


def source_of(name: str, settings: Settings) -> str:
    """The name by which workers find a model: for a shape its folder in the cache, made when first needed.

    Raises:
        ModelNotFound: the model that gives the vocabulary is not installed; the message says how to get it.
        OSError: the cache can't be written to.
    """
    if name not in SHAPES:
        return name
    return str(shape_folder(name, cache_folder(settings) / "bench" / "models"))


def shape_folder(name: str, folder: Path) -> Path:
    """The model of a shape in this folder, made unless it is there.

    Raises:
        ModelNotFound: the model that gives the vocabulary is not installed.
        OSError: the folder can't be written to.
    """
    made = folder / name
    if made.is_dir():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    # Under another name first, so that an existing folder is complete.
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as scratch:
        unfinished = Path(scratch) / name
        write_shape(SHAPES[name], unfinished)
        try:
            unfinished.rename(made)
        except OSError:
            if not made.is_dir():  # else another process made it first
                raise
    return made


def describe(name: str) -> str:
    """A model in a few words."""
    if name not in SHAPES:
        return f"{name}, its real weights"
    shape = SHAPES[name]
    return (
        f"{name}: {shape.layers} layers of {shape.hidden} with {shape.heads} heads, {shape.pooling} pooling, texts of "
        f"up to {MAX_TOKENS} tokens, random weights"
    )


def write_shape(shape: ModelShape, folder: Path, vocabulary: Path | None = None) -> None:
    """Write a model of a shape.

    Args:
        folder: must not exist.
        vocabulary: the folder of a model that gives the tokenizer and the modules; it needs no weights. None for the
            installed all-MiniLM-L6-v2.

    Raises:
        ModelNotFound: all-MiniLM-L6-v2 is not installed; the message says how to get it.
    """
    import torch
    from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

    shutil.copytree(vocabulary or resolve_model(_VOCABULARY).folder, folder)
    for weights in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        weights.unlink()
    words = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    _edit(folder / "sentence_bert_config.json", max_seq_length=MAX_TOKENS)
    _edit(
        folder / "1_Pooling" / "config.json",
        word_embedding_dimension=shape.hidden,
        pooling_mode_cls_token=shape.pooling == "cls",
        pooling_mode_mean_tokens=shape.pooling == "mean",
    )
    # The same weights on every machine, without changing the process's other random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if shape.family == "bert":
            config = BertConfig(
                vocab_size=words,
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                intermediate_size=4 * shape.hidden,
                max_position_embeddings=MAX_TOKENS,
                initializer_range=_INITIALIZER_RANGE,
            )
            BertModel(config).save_pretrained(folder)
            return
        distilled = DistilBertConfig(
            vocab_size=words,
            dim=shape.hidden,
            n_layers=shape.layers,
            n_heads=shape.heads,
            hidden_dim=4 * shape.hidden,
            max_position_embeddings=MAX_TOKENS,
            initializer_range=_INITIALIZER_RANGE,
        )
        DistilBertModel(distilled).save_pretrained(folder)
        # DistilBERT has no token types, so its tokenizer must make none.
        _edit(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}, indent=2), encoding="utf-8")

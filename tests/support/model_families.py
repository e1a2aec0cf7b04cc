"""The families of models that the field uses, each as a small model with random weights and the family's own modules.

They stand in the tables of docs/models.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import Tiny, dense, fill, make_model, weights_of, write_json, write_tokenizer
from tests.support.tiny_tokenizers import TOKENIZERS

_MODULES = "sentence_transformers.models"


@dataclass(frozen=True)
class ModelFamily:
    """A row of the table.

    Attributes:
        name: of the family.
        models: a few of its models, for people.
        make: writes a small one into a folder.
        longest: tokens of the longest text of that one; None if it has no limit.
        refused: what the refusal says, if all classes refuse the family; a regular expression.
    """

    name: str
    models: str
    make: Callable[[Path], Path]
    longest: int | None = 32
    refused: str = ""

    def __str__(self) -> str:
        return self.name


def tiny(**options: Any) -> Callable[[Path], Path]:
    """Makes a model as :class:`Tiny` says."""
    return partial(_tiny, Tiny(**options))


def _tiny(model: Tiny, folder: Path) -> Path:
    return make_model(folder, model)


def write_modules(folder: Path, modules: Sequence[tuple[str, Mapping[str, Any]]], prompts: Any = None) -> None:
    """Write the modules after the transformer, each as (kind, its configuration), with random weights."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULES}.Transformer"}]
    for at, (kind, config) in enumerate(modules, 1):
        path = f"{at}_{kind}"
        listed.append({"idx": at, "name": str(at), "path": path, "type": f"{_MODULES}.{kind}"})
        write_json(folder / path / "config.json", config)
        if weights := weights_of(kind, config, at):
            save_file(weights, str(folder / path / "model.safetensors"))
    write_json(folder / "modules.json", listed)
    if prompts is not None:
        write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})


def pooling(*modes: str, size: int = 32) -> tuple[str, dict[str, Any]]:
    """A Pooling module with these modes."""
    return "Pooling", {"embedding_dimension": size, "pooling_mode": list(modes), "include_prompt": True}


NORMALIZE: tuple[str, dict[str, Any]] = ("Normalize", {})


def _gemma(folder: Path) -> Path:
    """As embeddinggemma-300m: two Dense modules, and prompts of which none is the default."""
    make_model(folder, Tiny("gemma"))
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    write_modules(folder, [pooling("mean"), dense(32, 96), dense(96, 24), NORMALIZE], prompts)
    return folder


def _t5(folder: Path) -> Path:
    """As sentence-t5 and gtr-t5."""
    make_model(folder, Tiny("t5"))
    write_modules(folder, [pooling("mean"), dense(32, 24), NORMALIZE])
    return folder


def _clip(folder: Path) -> Path:
    """As clip-ViT-B-32: one module in a folder of its own, which reads texts and images."""
    words = TOKENIZERS["clip"](False)
    ids = {name: words.id_of(name) for name in ("bos_token", "eos_token", "pad_token")}
    sizes = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={
            **sizes,
            **{f"{name}_id": known for name, known in ids.items()},
            "vocab_size": words.tokenizer.get_vocab_size(),
            "max_position_embeddings": 32,
            "projection_dim": 24,
        },
        vision_config={**sizes, "image_size": 16, "patch_size": 8, "projection_dim": 24},
        projection_dim=24,
    )
    model = transformers.CLIPModel(config)
    fill(model, 0)
    inside = folder / "0_CLIPModel"
    model.save_pretrained(inside)
    write_tokenizer(inside, Tiny(positions=32), words)
    write_json(
        inside / "preprocessor_config.json",
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16},
    )
    write_json(
        folder / "modules.json",
        [{"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}],
    )
    return folder


def rewritten(make: Callable[[Path], Path], change: Callable[[Path], None]) -> Callable[[Path], Path]:
    """Makes a model and changes its files."""

    def made(folder: Path) -> Path:
        make(folder)
        change(folder)
        return folder

    return made


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    """Change fields of a model's file; None removes one."""
    path = folder / file
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {name: value for name, value in {**known, **changes}.items() if value is not None})


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change a model's weights."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def _gte_new(folder: Path) -> None:
    code = "Alibaba-NLP/new-impl--modeling.NewModel"
    edit(folder, model_type="new", architectures=["NewModel"], auto_map={"AutoModel": code})


def _jina_v2(folder: Path) -> None:
    """Its configuration says that it is a BERT; its weights, and the author's code, are something else."""
    code = "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"
    edit(folder, architectures=["JinaBertForMaskedLM"], auto_map={"AutoModel": code}, position_embedding_type="alibi")
    edit_weights(folder, lambda weights: {name: each for name, each in weights.items() if "position" not in name})


def _gte_qwen(folder: Path) -> None:
    edit(folder, auto_map={"AutoModel": "modeling_qwen.Qwen2Model"})


def _static(folder: Path) -> Path:
    """As the model2vec models: a table of words, and nothing else."""
    words = TOKENIZERS["bert"](True).tokenizer
    table = torch.randn(words.get_vocab_size(), 16, generator=torch.Generator().manual_seed(0))
    inside = folder / "0_StaticEmbedding"
    inside.mkdir()
    save_file({"embedding.weight": table}, str(inside / "model.safetensors"))
    words.save(str(inside / "tokenizer.json"))
    kind = f"{_MODULES}.StaticEmbedding"
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": inside.name, "type": kind}])
    return folder


def _words(folder: Path) -> Path:
    """As the models of averaged word vectors, which have words for tokens."""
    inside = folder / "0_WordEmbeddings"
    tokenizer = f"{_MODULES}.tokenizer.WhitespaceTokenizer"
    config = {"tokenizer_class": tokenizer, "update_embeddings": False, "max_seq_length": 100}
    write_json(inside / "wordembedding_config.json", config)
    known = {"vocab": ["PADDING_TOKEN", "the", "text"], "stop_words": [], "do_lower_case": False}
    write_json(inside / "whitespacetokenizer_config.json", known)
    save_file({"emb_layer.weight": torch.ones(3, 16)}, str(inside / "model.safetensors"))
    write_json(inside.parent / "1_Pooling" / "config.json", pooling("mean", size=16)[1])
    kinds = [(inside.name, "WordEmbeddings"), ("1_Pooling", "Pooling")]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"{_MODULES}.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    return folder


_CODE = "its author's own code"
FAMILIES = [
    ModelFamily("BERT", "all-MiniLM-L6-v2, bge-…-v1.5, e5-…-v2", tiny(normalize=True)),
    ModelFamily("DistilBERT", "msmarco-distilbert-…", tiny(family="distilbert", pooling="cls")),
    ModelFamily("RoBERTa", "all-roberta-large-v1", tiny(family="roberta", max_seq_length=None, positions=32)),
    ModelFamily(
        "XLM-RoBERTa",
        "bge-m3, multilingual-e5-…, arctic-embed-l-v2.0",
        tiny(family="xlm-roberta", pooling="cls", normalize=True),
    ),
    ModelFamily("MPNet", "all-mpnet-base-v2", tiny(family="mpnet", normalize=True)),
    ModelFamily("ModernBERT", "gte-modernbert-base, modernbert-embed-base", tiny(family="modernbert", pooling="cls")),
    ModelFamily("NomicBERT", "nomic-embed-text-v1.5", tiny(family="nomic-bert", normalize=True)),
    ModelFamily("GTE (`gte`)", "gte-multilingual-base of alibaba-nlp-community", tiny(family="gte", pooling="cls")),
    ModelFamily("Qwen2", "jina-code-embeddings-…", tiny(family="qwen2", pooling="lasttoken", normalize=True)),
    ModelFamily("Qwen3", "Qwen3-Embedding-…", tiny(family="qwen3", pooling="lasttoken", normalize=True)),
    ModelFamily("Mistral", "e5-mistral-7b-instruct", tiny(family="mistral", pooling="lasttoken", normalize=True)),
    ModelFamily("Gemma 3", "embeddinggemma-300m", _gemma),
    ModelFamily("T5 (the encoder)", "sentence-t5-…, gtr-t5-…", _t5),
    ModelFamily("CLIP (texts)", "clip-ViT-B-32, clip-ViT-L-14", _clip),
    ModelFamily("GTE (`new`)", "gte-multilingual-base, gte-large-en-v1.5", rewritten(tiny(), _gte_new), refused=_CODE),
    ModelFamily("JinaBERT", "jina-embeddings-v2-…", rewritten(tiny(), _jina_v2), refused=_CODE),
    ModelFamily(
        "Qwen2 with code",
        "gte-Qwen2-…-instruct",
        rewritten(tiny(family="qwen2", pooling="lasttoken"), _gte_qwen),
        refused=_CODE,
    ),
    ModelFamily("StaticEmbedding", "potion-…, static-retrieval-mrl-en-v1", _static, refused="StaticEmbedding"),
    ModelFamily("WordEmbeddings", "average_word_embeddings_…", _words, refused="WordEmbeddings"),
]

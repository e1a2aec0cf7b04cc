"""Models as systems take them: folders of sentence-transformers, shapes with random weights, and conversions."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embedctl_bench.peers.child import Unavailable, run
from embedctl_bench.peers.environments import environment_for, python_of
from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.files import ModelFiles, read_json, resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Models with positions for this many tokens are made to take them: some are shipped with a lower limit.
MAX_TOKENS = 512
_CONVERT_S = 1800

#: Format → the environment whose libraries convert a folder to it. The converter is `convert.py`.
FORMATS = {
    "onnx": "st-onnx",
    "openvino": "st-openvino",
    "openvino-int8": "st-openvino",
    "ctranslate2": "ctranslate2",
}

#: Files that a copy of a model leaves out: conversions to other formats, and those of version control.
_LEFT_OUT = ("onnx", "openvino", "*.onnx", "*.h5", "*.msgpack", "*.ot", ".git*", ".cache")
_LIMITS = "sentence_bert_config.json"

#: Layers, hidden size and inner size of a feed-forward block: BERT's names, and DistilBERT's.
_SIZES = (("num_hidden_layers", "n_layers"), ("hidden_size", "dim"), ("intermediate_size", "hidden_dim"))
#: The model that gives shapes their vocabulary.
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


#: Models by their shape, with random weights. Their vectors mean nothing, and are compared with those of torch on the
#: same weights.
SHAPES = {
    "minilm-shape": ModelShape("bert", layers=6, hidden=384, heads=12, pooling="mean"),
    "bge-small-shape": ModelShape("bert", layers=12, hidden=384, heads=12, pooling="cls"),
    "bge-base-shape": ModelShape("bert", layers=12, hidden=768, heads=12, pooling="cls"),
    "bge-large-shape": ModelShape("bert", layers=24, hidden=1024, heads=16, pooling="cls"),
    "distilbert-shape": ModelShape("distilbert", layers=6, hidden=768, heads=12, pooling="mean"),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model of sentence-transformers.

    Attributes:
        name: of its files, and the name by which jobs and systems know it.
        flops_per_token: operations of the matrix products with weights. Those of attention depend on lengths and are
            left out.
    """

    name: str
    folder: Path
    flops_per_token: float

    @classmethod
    def in_folder(cls, name: str, folder: Path) -> Model:
        """A model by its configuration, which uses the names of BERT or of DistilBERT, else raises Unavailable."""
        config = read_json(folder / "config.json")
        found: list[Any] = [config.get(bert, config.get(distilbert)) for bert, distilbert in _SIZES]
        if not all(isinstance(each, int) for each in found):
            raise Unavailable(f"{folder / 'config.json'} does not say how large the model's layers are")
        layers, hidden, inner = found
        return cls(name, folder, 2.0 * layers * hidden * (4 * hidden + 2 * inner))

    def lengths(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokens of texts, special tokens included."""
        return tuple(len(each.ids) for each in self.tokenizer().encode_batch(list(texts)))

    def tokenizer(self) -> Tokenizer:
        """Its fast tokenizer, which neither truncates nor pads; raises Unavailable if it has none."""
        from tokenizers import Tokenizer

        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise Unavailable(f"{path} is missing: other systems need a fast tokenizer")
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @property
    def max_tokens(self) -> int:
        """The longest text that it takes whole (tokens): the configured limit, else its positions."""
        limit = (read_json(self.folder / _LIMITS) or {}).get("max_seq_length")
        return int(limit or read_json(self.folder / "config.json").get("max_position_embeddings", 0))


def converted(model: Model, form: str, place: Path) -> Path:
    """The model's folder in a format, converted when first needed, else Unavailable; its own for the empty name."""
    if not form:
        return model.folder
    folder = place / "models" / f"{model.name}.{form}"

    def convert(into: Path) -> None:
        package, variables = environment_for(FORMATS[form])
        command: list[str | Path] = [python_of(FORMATS[form], place), "-P", "-m", f"{package}.convert", form]
        log = place / f"{folder.name}.log"
        run([*command, model.folder, into], log, timeout=_CONVERT_S, variables=variables)

    return written(folder, convert)


def uncut(name: str, source: Path, place: Path) -> Model:
    """A model that does not truncate before 512 tokens, if it has the positions: the model itself, or a copy of this
    name, which differs for other weights."""
    model = Model.in_folder(name, source)
    positions = read_json(source / "config.json").get("max_position_embeddings", 0)
    if model.max_tokens >= MAX_TOKENS or positions < MAX_TOKENS:
        return model

    def copy(into: Path) -> None:
        shutil.copytree(source, into, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        edit_json(into / _LIMITS, max_seq_length=MAX_TOKENS)

    return Model.in_folder(name, written(place / "models" / name, copy))


def written(folder: Path, make: Callable[[Path], object]) -> Path:
    """A folder, made unless it is there: under another name first, so that an existing one is complete."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        unfinished = Path(scratch) / folder.name
        make(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process made it first
                raise
    return folder


def model_files(name: str, settings: Settings) -> ModelFiles:
    """A model as it is configured, or a shape's, which is made in the cache when first needed; errors as of
    `resolve_model`, for a shape of the model that gives the vocabulary."""
    entry = settings.models.get(name, ModelEntry())
    if name in SHAPES and not entry.source:
        own = Path(settings.models.get(_VOCABULARY, ModelEntry()).source or "none")
        vocabulary = own if own.is_dir() else resolve_model(_VOCABULARY).folder  # its weights may be missing
        folder = cache_folder(settings) / "bench" / "models" / name
        entry = replace(entry, source=str(written(folder, lambda into: write_shape(SHAPES[name], into, vocabulary))))
    return resolve_model(name, entry)


def peers_folder(settings: Settings) -> Path:
    """The folder of the peers' environments and of their forms of models."""
    return cache_folder(settings) / "peers"


def measured_model(name: str, settings: Settings, place: Path) -> Model:
    """A model that does not truncate before 512 tokens, if it has the positions. Its copies have other names for other
    weights. Errors are those of :func:`model_files`, and Unavailable."""
    files = model_files(name, settings)
    return uncut(f"{slug(files.name)}-{files.fingerprint[:8]}", files.folder, place)


def slug(name: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")


def describe(name: str) -> str:
    """A model in a few words."""
    if name not in SHAPES:
        return f"{name}, its real weights"
    shape = SHAPES[name]
    return (
        f"{name}: {shape.layers} layers of {shape.hidden} with {shape.heads} heads, {shape.pooling} pooling, texts of "
        f"up to {MAX_TOKENS} tokens, random weights"
    )


def write_shape(shape: ModelShape, folder: Path, vocabulary: Path) -> None:
    """Write a model of a shape into a new folder, with tokenizer and modules of another one, which needs no weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    shutil.copytree(vocabulary, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", *_LEFT_OUT))
    edit_json(folder / _LIMITS, max_seq_length=MAX_TOKENS)
    edit_json(
        folder / "1_Pooling" / "config.json",
        word_embedding_dimension=shape.hidden,
        pooling_mode_cls_token=shape.pooling == "cls",
        pooling_mode_mean_tokens=shape.pooling == "mean",
    )
    sizes = {
        "vocab_size": read_json(folder / "config.json")["vocab_size"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "intermediate_size" if shape.family == "bert" else "hidden_dim": 4 * shape.hidden,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": _INITIALIZER_RANGE,
    }
    # The same weights on every machine, without changing the process's other random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.for_model(shape.family, **sizes)).save_pretrained(folder)
    if shape.family == "distilbert":  # it has no token types, so its tokenizer must make none
        edit_json(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])


def edit_json(path: Path, **changes: object) -> None:
    """Change some values of the JSON object in a file."""
    path.write_text(json.dumps({**read_json(path), **changes}, indent=2), encoding="utf-8")

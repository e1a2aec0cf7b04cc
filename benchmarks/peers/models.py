"""The models that every system encodes with: sentence-transformers folders, and what engines convert from them.

all-MiniLM-L6-v2 is the real one. bge-small, bge-base and bge-large are random weights of these models' shapes, with
MiniLM's vocabulary: speed depends on shapes alone, and accuracy is measured against torch with the same weights.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import BUILD, HERE, python_of, run

#: Every model takes its positions' whole length, so that W2 fits.
MAX_TOKENS = 512
#: Larger than BERT's 0.02, at which random layers hardly tell one text from another.
_INITIALIZER_RANGE = 0.05
_CONVERT_S = 1800

#: Format → the environment whose libraries convert a folder to it. The converter is `convert_FORMAT.py`.
FORMATS = {"onnx": "st-onnx", "openvino": "st-openvino", "ctranslate2": "ctranslate2"}


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its shape. `random` says that its weights are ours."""

    name: str
    layers: int
    hidden: int
    pooling: str
    random: bool = True
    heads: int = 12

    @property
    def flops_per_token(self) -> float:
        """Of the matrix products with weights; attention's own depend on lengths and are left out."""
        return 2.0 * self.layers * 12 * self.hidden**2


MODELS = {
    "minilm": Model("minilm", layers=6, hidden=384, pooling="mean", random=False),
    "bge-small": Model("bge-small", layers=12, hidden=384, pooling="cls"),
    "bge-base": Model("bge-base", layers=12, hidden=768, pooling="cls"),
    "bge-large": Model("bge-large", layers=24, hidden=1024, pooling="cls", heads=16),
}


def folder_of(model: Model, form: str = "", seed: Path | None = None) -> Path:
    """The model's folder, or one converted to a format; made when first asked for.

    Args:
        seed: all-MiniLM-L6-v2's folder, which gives tokenizer and modules; the installed package's where None. Weights
            are needed only for the model that has real ones.

    Raises:
        Unavailable: it can't be converted.
    """
    source = BUILD / "models" / model.name
    if not source.is_dir():
        _write(source, _make, model, seed)
    if not form:
        return source
    converted = source.with_name(f"{model.name}.{form}")
    if not converted.is_dir():
        command = [python_of(FORMATS[form]), "-m", f"benchmarks.peers.convert_{form}", source]
        log = BUILD / f"{converted.name}.log"
        _write(converted, lambda into: run([*command, into], log, timeout=_CONVERT_S, cwd=HERE.parents[1]))
    return converted


def _write(folder: Path, make, *arguments) -> None:
    """Make a folder under another name first, so that one that exists is whole."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    make(*arguments, unfinished)
    unfinished.rename(folder)


def _make(model: Model, seed: Path | None, folder: Path) -> None:
    from embedctl_workers.models import resolve_model

    shutil.copytree(seed or resolve_model("all-MiniLM-L6-v2").folder, folder)
    _edit(folder / "sentence_bert_config.json", max_seq_length=MAX_TOKENS)
    if model.random:
        _randomize(model, folder)


def _randomize(model: Model, folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    _edit(
        folder / "1_Pooling" / "config.json",
        word_embedding_dimension=model.hidden,
        pooling_mode_cls_token=model.pooling == "cls",
        pooling_mode_mean_tokens=model.pooling == "mean",
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=4 * model.hidden,
        initializer_range=_INITIALIZER_RANGE,
    )
    BertModel(config).save_pretrained(folder)


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2))

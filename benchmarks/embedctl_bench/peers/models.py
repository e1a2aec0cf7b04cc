"""A model as other systems take it: a folder of sentence-transformers, or its conversion to another format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedctl_bench.peers.child import Unavailable, run
from embedctl_bench.peers.environments import environment_for, python_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Models with positions for this many tokens are made to take them: some are shipped with a lower limit.
MAX_TOKENS = 512
_CONVERT_S = 1800

#: Format → the environment whose libraries convert a folder to it. The converter is `convert_FORMAT.py`.
FORMATS = {"onnx": "st-onnx", "openvino": "st-openvino", "ctranslate2": "ctranslate2"}

#: Files that a copy of a model leaves out: conversions to other formats, and those of version control.
_LEFT_OUT = ("onnx", "openvino", "*.onnx", "*.h5", "*.msgpack", "*.ot", ".git*", ".cache")
_LIMITS = "sentence_bert_config.json"


@dataclass(frozen=True, slots=True)
class Model:
    """A model of sentence-transformers.

    Attributes:
        name: of its files, and the name by which jobs and systems know it.
        inner: size of the layer between the two of a feed-forward block.
    """

    name: str
    folder: Path
    layers: int
    hidden: int
    inner: int

    @classmethod
    def in_folder(cls, name: str, folder: Path) -> Model:
        """A model by its configuration, which uses the names of BERT or of DistilBERT.

        Raises:
            Unavailable: it uses neither.
        """
        config = read_json(folder / "config.json")
        found: list[Any] = [
            config.get(bert, config.get(distilbert))
            for bert, distilbert in (
                ("num_hidden_layers", "n_layers"),
                ("hidden_size", "dim"),
                ("intermediate_size", "hidden_dim"),
            )
        ]
        if not all(isinstance(each, int) for each in found):
            raise Unavailable(f"{folder / 'config.json'} does not say how large the model's layers are")
        return cls(name, folder, *found)

    def lengths(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokens of texts, special tokens included.

        Raises:
            Unavailable: it has no fast tokenizer.
        """
        return tuple(len(each.ids) for each in self.tokenizer().encode_batch(list(texts)))

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, which neither truncates nor pads.

        Raises:
            Unavailable: it has no fast tokenizer.
        """
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
        path = self.folder / _LIMITS
        limit = read_json(path).get("max_seq_length") if path.is_file() else None
        return int(limit or read_json(self.folder / "config.json").get("max_position_embeddings", 0))

    @property
    def flops_per_token(self) -> float:
        """Operations of the matrix products with weights. Those of attention depend on lengths and are left out."""
        return 2.0 * self.layers * self.hidden * (4 * self.hidden + 2 * self.inner)


def converted(model: Model, form: str, place: Path) -> Path:
    """The model's folder in a format, converted when first needed; its own folder for the empty name.

    Raises:
        Unavailable: it can't be converted.
    """
    if not form:
        return model.folder
    folder = place / "models" / f"{model.name}.{form}"
    if not folder.is_dir():
        environment = FORMATS[form]
        package, variables = environment_for(environment)
        python, converter = python_of(environment, place), f"{package}.convert_{form}"
        command: list[str | Path] = [python, "-P", "-m", converter, model.folder]
        log = place / f"{folder.name}.log"
        written(folder, lambda into: run([*command, into], log, timeout=_CONVERT_S, variables=variables))
    return folder


def uncut(name: str, source: Path, place: Path) -> Model:
    """A model that does not truncate before 512 tokens, if it has the positions: the model itself, or a copy.

    Args:
        name: of the copy; different for other weights.
    """
    limit = read_json(source / _LIMITS).get("max_seq_length") if (source / _LIMITS).is_file() else None
    positions = read_json(source / "config.json").get("max_position_embeddings", 0)
    if limit is None or limit >= MAX_TOKENS or positions < MAX_TOKENS:
        return Model.in_folder(name, source)
    folder = place / "models" / name
    if not folder.is_dir():

        def copy(into: Path) -> None:
            shutil.copytree(source, into, ignore=shutil.ignore_patterns(*_LEFT_OUT))
            edit_json(into / _LIMITS, max_seq_length=MAX_TOKENS)

        written(folder, copy)
    return Model.in_folder(name, folder)


def written(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder under another name first, so that an existing folder is complete."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    make(unfinished)
    unfinished.rename(folder)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def edit_json(path: Path, **changes: object) -> None:
    """Change some values of the JSON object in a file."""
    path.write_text(json.dumps({**read_json(path), **changes}, indent=2), encoding="utf-8")

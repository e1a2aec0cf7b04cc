"""What a model's own files say about it, read without any model runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedctl_config.errors import ModelError
from embedctl_workers.models.files import deciding_files, read_json

#: Names of the hidden size and of the most positions in `config.json`, by architecture.
_WIDTHS = ("hidden_size", "d_model", "dim", "n_embd", "projection_dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_trained_positions")
#: Architectures whose texts begin at the position after that of the padding token.
_AFTER_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "xlm-roberta-xl", "xmod"}
#: Tokenizers without a limit state this or more (tokens).
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's facts. None means that its files do not say."""

    dimensions: int | None
    longest_text: int | None  #: most tokens of a text, special ones included
    size: int  #: bytes of the files that decide its vectors
    architecture: str | None  #: such as `bert`
    modules: tuple[str, ...]  #: the kinds of its modules, in order; empty if it has only a transformer


def facts_of(folder: Path) -> ModelFacts:
    """The facts of the model in a folder; a ModelError as of :func:`~embedctl_workers.models.files.fingerprint_of`."""
    try:
        files = deciding_files(folder)
        size = sum(path.stat().st_size for path in files)
        modules = _json(folder / "modules.json", [])
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        folders = [folder / module["path"] for module in modules]
        transformer = transformer_of(folder)
        config = _json(transformer / "config.json", {})
        return ModelFacts(
            dimensions=_cut(_dimensions(kinds, folders, config), folder),
            longest_text=_longest_text(transformer, config),
            size=size,
            architecture=config.get("model_type"),
            modules=tuple(kinds),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder} can't be read: {error!r}") from error


def transformer_of(folder: Path) -> Path:
    """The folder of a model's first module, which has the tokenizer; raises ValueError, KeyError, TypeError or OSError
    if `modules.json` can't be read."""
    modules = _json(folder / "modules.json", [])
    return folder / modules[0]["path"] if modules else folder


def _dimensions(kinds: list[str], folders: list[Path], config: dict[str, Any]) -> int | None:
    """The output of the last module that changes the number of dimensions."""
    found = next((config[name] for name in _WIDTHS if name in config), None)
    for kind, folder in zip(kinds, folders, strict=True):
        own = _json(folder / "config.json", {}) if kind in ("Pooling", "Dense") else {}
        if kind == "Dense":
            found = own.get("out_features", found)
        elif kind == "Pooling":
            width = own.get("word_embedding_dimension", own.get("embedding_dimension", found))
            found = width * _ways(own) if width else found
    return found


def _cut(dimensions: int | None, folder: Path) -> int | None:
    kept = _json(folder / "config_sentence_transformers.json", {}).get("truncate_dim")
    return min((int(each) for each in (dimensions, kept) if each), default=None)


def _ways(pooling: dict[str, Any]) -> int:
    modes = pooling.get("pooling_mode")
    if modes is not None:
        return 1 if isinstance(modes, str) else max(1, len(modes))
    return max(1, sum(value is True for name, value in pooling.items() if name.startswith("pooling_mode_")))


def _longest_text(transformer: Path, config: dict[str, Any]) -> int | None:
    """The limit that the model states, else the smaller one of its positions and its tokenizer."""
    positions = next((config[name] for name in _POSITIONS if name in config), None)
    limits = [positions, _json(transformer / "tokenizer_config.json", {}).get("model_max_length")]
    for path in sorted(transformer.glob("sentence_*_config.json")):
        if stated := _json(path, {}).get("max_seq_length"):
            limits = [stated]
            break
    if positions and config.get("model_type") in _AFTER_PADDING:
        limits.append(positions - config.get("pad_token_id", 1) - 1)
    return min((int(limit) for limit in limits if limit and limit < _NO_LIMIT), default=None)


def _json(path: Path, default: Any) -> Any:
    """The contents of a file, a ValueError if they are of another kind than the default; the default without a file."""
    value = read_json(path)
    if value is None:
        return default
    if not isinstance(value, type(default)):
        raise ValueError(f"{path} holds no {'list' if isinstance(default, list) else 'object'}")  # noqa: TRY004  (one kind of error for a file that can't be read)
    return value

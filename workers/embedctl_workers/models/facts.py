"""What a model's own files say about it, read without any model runtime: its sizes and its prompts; and the longest
text of a loaded one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedctl_config.errors import ModelError
from embedctl_config.outputs import Output
from embedctl_workers.models.files import ModelFiles, deciding_files, outputs_of_folder, read_json

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

#: Names of the hidden size and of the most positions in `config.json`, by architecture.
_WIDTHS = ("hidden_size", "d_model", "dim", "n_embd", "projection_dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_trained_positions")
#: Architectures whose texts begin at the position after that of the padding token.
_AFTER_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "xlm-roberta-xl", "xmod"}
#: Tokenizers without a limit state this or more (tokens).
_NO_LIMIT = 10**9
#: The longest text of a model without a limit (tokens).
UNLIMITED = 2**31 - 1
_PROMPTS_FILE = "config_sentence_transformers.json"
#: Most characters of all names together that a heartbeat tells.
_MOST_TOLD = 1000
#: Of a card, how much is read; and what it says if the model was trained for shorter vectors (arXiv:2205.13147). A tag
#: in its metadata, which sentence-transformers also writes of a loss; or the dimensions, there or beside the loss. Each
#: pattern takes a time in proportion to the card, whatever it holds.
_MOST_CARD = 1024 * 1024
_METADATA = re.compile(r"---[ \t]*\n(.*?)\n---", re.DOTALL)
_TAG = re.compile(
    r"""^([ \t]*-|tags:[ \t]*\[(.*,)?)[ \t]*["']?(loss:)?matryoshka(\w*loss)?["']?[ \t]*([],]|$)""",
    re.IGNORECASE | re.MULTILINE,
)
_SIZES = re.compile(r"""matryoshka_dim(ension)?s["']?\s*:\s*([\[-]\s*)?\d""", re.IGNORECASE)

#: Of a pooling, as older files state it; and TEI's words for some of sentence-transformers'.
_MODE = re.compile("pooling_mode_(.+?)(_tokens?)?")
_TEI_MODES = {"lasttoken": "last_token", "last": "last_token"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's facts. None means that its files do not say."""

    dimensions: int | None  #: of a vector, or of each token's of a multi-vector; None of a sparse one
    longest_text: int | None  #: most tokens of a text, special ones included
    size: int  #: bytes of the files that decide its vectors
    architecture: str | None  #: such as `bert`
    modules: tuple[str, ...]  #: the kinds of its modules, in order; empty if it has only a transformer
    outputs: tuple[Output, ...]  #: what it gives of a text


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
        outputs = outputs_of_folder(folder)
        return ModelFacts(
            dimensions=None if outputs == (Output.SPARSE,) else _cut(_dimensions(kinds, folders, config), folder),
            longest_text=_longest_text(transformer, config),
            size=size,
            architecture=config.get("model_type"),
            modules=tuple(kinds),
            outputs=outputs,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder} can't be read: {error!r}") from error


def is_matryoshka(folder: Path) -> bool:
    """Whether a model's configuration or card says that the first components of its vectors are vectors too."""
    try:
        config = _json(transformer_of(folder) / "config.json", {})
        if config.get("is_matryoshka") or config.get("matryoshka_dimensions"):  # as vLLM reads them
            return True
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            card = file.read(_MOST_CARD)
        metadata = _METADATA.match(card)
        return bool(_SIZES.search(card) or (metadata and _TAG.search(metadata[1])))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def pooling_of(files: ModelFiles) -> str:
    """How a model makes what it gives of a text from the states of its tokens, in TEI's words: `mean`, `cls`,
    `last_token`, `splade`; or in those of sentence-transformers, several with a +. Empty if its files do not say."""
    try:
        modes = [files.pooling]
        for module in _json(files.folder / "modules.json", []):
            kind = str(module["type"]).rpartition(".")[2]
            if kind == "SpladePooling":
                modes = ["splade"]
            elif kind == "Pooling":
                modes = _modes(_json(files.folder / module["path"] / "config.json", {}))
        return "+".join(_TEI_MODES.get(mode, mode) for mode in modes)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


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
    return max(1, len(_modes(pooling)))


def _modes(pooling: dict[str, Any]) -> list[str]:
    modes = pooling.get("pooling_mode")
    if modes is not None:
        return [modes] if isinstance(modes, str) else modes
    said = (_MODE.fullmatch(name) for name, value in pooling.items() if value is True)
    return [found[1] for found in said if found]


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


def longest_text(model: SentenceTransformer) -> int:
    """Most tokens of a text, special ones included: what the model states, but no more than it has positions for.

    RoBERTa and its kin have 514 embeddings of positions, and a text uses all but two. Some models state 514, and fail
    with the texts that are longer than 512. A model without a limit has :data:`UNLIMITED`.
    """
    limits = [model.max_seq_length or UNLIMITED, UNLIMITED]
    for part in model.modules():
        positions = getattr(getattr(part, "position_embeddings", None), "num_embeddings", None)
        if positions is not None:
            padding = getattr(part, "padding_idx", None)
            limits.append(positions - (0 if padding is None else padding + 1))
    return int(min(limits))


def prompts_of(folder: Path) -> Mapping[str, str]:
    """The prompts of the model in a folder: name → text, which may be empty. A ModelError if they can't be read."""
    path = folder / _PROMPTS_FILE
    try:
        prompts = (read_json(path) or {}).get("prompts") or {}
        return {str(name): text for name, text in prompts.items() if isinstance(text, str)}
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} can't be read: {error!r}") from error


def prompt_named(folder: Path, name: str) -> str:
    """The prompt of this name, or with an empty one the default, if there is one. KeyError: there is none; ModelError
    as of :func:`prompts_of`."""
    prompts = prompts_of(folder)
    if name:
        return prompts[name]
    return prompts.get(str((read_json(folder / _PROMPTS_FILE) or {}).get("default_prompt_name")), "")


def told(prompts: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names for a heartbeat; None if they are too many."""
    return tuple(sorted(prompts)) if sum(map(len, prompts)) <= _MOST_TOLD else None

"""Which files of a model decide its vectors, by their names alone: of a folder, or of a hub's listing; and which models
are refused, because their author's code decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from embedctl_config.errors import ModelError
from embedctl_config.outputs import Output
from embedctl_workers.models.kinds import outputs_stated

#: A part of the name of an author's code → a model that needs none.
_SIBLINGS = {
    "new-impl": "alibaba-nlp-community/gte-multilingual-base or Alibaba-NLP/gte-modernbert-base",
    "qwen": "Qwen/Qwen3-Embedding-0.6B",
    "": "Alibaba-NLP/gte-modernbert-base",
}
#: The one architecture whose models name their author's code, and that transformers computes from the same files.
_NATIVE = "nomic_bert"
#: Its author's fields, which transformers does not read → transformers' field of the same meaning, and its default.
_NATIVE_FIELDS: Mapping[str, tuple[str, object]] = {
    "n_embd": ("hidden_size", 768),
    "n_layer": ("num_hidden_layers", 12),
    "n_head": ("num_attention_heads", 12),
    "n_inner": ("intermediate_size", 3072),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-12),
    "activation_function": ("", "swiglu"),
    "rotary_emb_base": ("", 1000),
    "rotary_emb_fraction": ("", 1),
    "rotary_emb_interleaved": ("", False),
    "rotary_scaling_factor": ("", None),
    "prenorm": ("", False),
    "use_rms_norm": ("", False),
    "qkv_proj_bias": ("", False),
    "mlp_fc1_bias": ("", False),
    "mlp_fc2_bias": ("", False),
}
#: The modules of a model must have names that begin so.
_KINDS = "sentence_transformers."
#: PyLate's own name of a module of sentence-transformers, which the latter loads in its place.
_PYLATE = "pylate.models.Dense.Dense"
#: The heads for sparse vectors and multi-vectors beside the dense ones of bge-m3 and its kin.
BESIDE: Mapping[Output, str] = {Output.SPARSE: "sparse_linear.pt", Output.MULTI: "colbert_linear.pt"}
MODULES = "modules.json"
#: Modules that choose other modules for each text; the second one is the first one's older name.
_ROUTERS = ("Router", "Asym")
#: Modules that make of a token's state one of its neighbours' states, padding among them.
_NEIGHBOURS = ("CNN", "LSTM")
#: Files in which a module names others → the key of a single one; a router names several in `types`.
NAMING: Mapping[str, str] = {
    "router_config.json": "",
    "config.json": "",
    "wordembedding_config.json": "tokenizer_class",
}
#: A model with this file is a change to another one.
ADAPTER = "adapter_config.json"
#: Files in a model's top folder that decide its vectors. READMEs, exports to other runtimes and training notes don't.
DECIDING = (
    MODULES,
    "config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "model*.safetensors",
    "pytorch_model*.bin",
    *BESIDE.values(),
)
#: Weights for runtimes that no backend loads from a model's own folder.
_OTHER_RUNTIMES = (".h5", ".msgpack", ".ot", ".onnx", ".tflite", ".gguf")
#: The weights that are loaded, the first one that a folder has, and how the names of all weights of the kind begin. If
#: the whole file is missing, its parts are loaded.
_WEIGHTS = (("model.safetensors", "model", ".safetensors"), ("pytorch_model.bin", "pytorch_model", ".bin"))


def refuse_authors_code(file: str, config: Mapping[str, object]) -> None:
    """Refuse (ModelError) a model that its author's code computes: without it, transformers may compute other vectors.

    `config` holds the contents of its `config.json`, which is at `file`.
    """
    if config.get("model_type") == _NATIVE:
        _refuse_other_fields(file, config)
        return
    named = config.get("auto_map")
    if not isinstance(named, dict):
        return
    if code := named.get("AutoModel", named.get("AutoConfig")):
        sibling = next(sibling for part, sibling in _SIBLINGS.items() if part in str(code).lower())
        raise ModelError(
            f"{file} names {str(code)!r}, its author's own code, which embedctl does not run: choose a model that "
            f"transformers computes by itself, such as {sibling}, or a copy that was converted for it"
        )


def _refuse_other_fields(file: str, config: Mapping[str, object]) -> None:
    for theirs, (ours, default) in _NATIVE_FIELDS.items():
        computed = config.get(ours, default)
        if theirs in config and config[theirs] != computed:
            raise ModelError(
                f"{file} states {theirs} {config[theirs]!r}, which only its author's own code reads, and transformers "
                f"would compute with {computed!r}: choose a model that transformers computes by itself, such as "
                "nomic-ai/nomic-embed-text-v1.5"
            )


def module_folders(read: Callable[[str], Any], place: str) -> list[str]:
    """The folders of a model's modules, relative to the model's own, without the latter.

    `read` gives the parsed JSON of a file by its relative name, None if there is none, and may raise ValueError. A
    ModelError if a file can't be read, names a folder outside of the model's own, or a module that is not part of
    sentence-transformers or chooses between others; or if the model gives no vectors.
    """
    try:
        modules = read(MODULES)
        outputs_stated(read, modules, place)
        if modules is None:
            return []
        inside = [module["path"] for module in modules if module["path"]]
        kinds = [module["type"] for module in modules]
        check_kinds(f"{place}/{MODULES}", kinds)
        paths = [path for path in map(PurePosixPath, inside) if path.parts]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{place}/{MODULES} can't be read: {error!r}") from error
    if routers := [kind for kind in kinds if kind.rpartition(".")[2] in _ROUTERS]:
        raise ModelError(
            f"{place} is asymmetric: its module {routers[0]} runs other modules for queries than for documents, and "
            "embedctl does not choose between them. With sentence-transformers, save the modules of one route as a "
            "model of its own, and name its folder"
        )
    if mixed := [kind for kind in kinds if kind.rpartition(".")[2] in _NEIGHBOURS]:
        raise ModelError(
            f"{place} has the module {mixed[0]}, which mixes a text with its padding: its vectors depend on the other "
            "texts of a batch, so two workers would not give the same. Choose a model without it"
        )
    if outside := [path for path in paths if path.is_absolute() or ".." in path.parts]:
        raise ModelError(f"{place}/{MODULES} names a folder outside of the model's own: {outside[0]}")
    return [str(path) for path in paths]


def deciding(names: Collection[str], folders: Sequence[str]) -> list[str]:
    """Those of a model's files that decide its vectors, sorted; names are relative to its folder, like its modules'."""
    top = {name for name in names if "/" not in name and any(fnmatchcase(name, each) for each in DECIDING)}
    below = {name for name in names if any(name.startswith(f"{folder}/") for folder in folders)}
    return sorted(_loaded(top | below))


def check_named(where: str, name: str, config: object) -> None:
    """As :func:`check_kinds`, for the contents of a module's file that names others, or its author's code."""
    if name not in NAMING or not isinstance(config, dict):
        return
    if name == "config.json":
        refuse_authors_code(where, config)
    kinds, single = config.get("types"), NAMING[name]
    named = [*(kinds.values() if isinstance(kinds, dict) else ()), *([config[single]] if single in config else ())]
    check_kinds(where, named)


def refuse_adapters(place: str, names: Iterable[str]) -> None:
    """Refuse (ModelError) a model that is an adapter, by the names of its files."""
    if adapter := next((name for name in names if PurePosixPath(name).name == ADAPTER), None):
        raise ModelError(
            f"{place}/{adapter} makes the model an adapter of another one (PEFT): merge the two (`merge_and_unload()` "
            "of peft) and save the whole model"
        )


def check_kinds(where: str, kinds: Sequence[object]) -> None:
    """Refuse (ModelError) modules that are no part of sentence-transformers: some versions run the model's code."""
    foreign = [kind for kind in kinds if not (isinstance(kind, str) and (kind.startswith(_KINDS) or kind == _PYLATE))]
    if foreign:
        raise ModelError(
            f"{where} names the module {foreign[0]!r}, which is no part of sentence-transformers: embedctl runs no "
            "code that comes with a model. Choose a model that needs none"
        )


def _loaded(names: Iterable[str]) -> set[str]:
    """Without weights that nothing loads, because the same folder has others."""
    by_folder: dict[PurePosixPath, set[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.suffix not in _OTHER_RUNTIMES:
            by_folder.setdefault(path.parent, set()).add(path.name)
    return {str(folder / name) for folder, inside in by_folder.items() for name in _loaded_of_folder(inside)}


def _loaded_of_folder(names: set[str]) -> set[str]:
    for whole, begin, end in _WEIGHTS:
        if whole in names:
            names = {each for each in names if each == whole or not (each.startswith(begin) and each.endswith(end))}
    if any(each.endswith(".safetensors") for each in names):
        return {each for each in names if not each.endswith(".bin")}
    return names

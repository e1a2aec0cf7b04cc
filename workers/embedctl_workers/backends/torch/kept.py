"""What sentence-transformers made of a model, kept for the next start, which then need not import it.

That import takes five times as long as torch's own. A kept model is one that runs on packed tokens, and whose files
give the same weights, by the names that were kept, as sentence-transformers loaded. The accuracy gate compares its
vectors with those of sentence-transformers at each start, as with any other engine.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from embedctl_config.errors import ModelError
from embedctl_workers.arrays.tokens import Side
from embedctl_workers.backends.torch.packed.modules import MODES, FirstDimensions, Normalized, Pooled, Projected
from embedctl_workers.backends.torch.packed.weights import Layer, Weights
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import keep, kept, shipped
from embedctl_workers.models.files import ModelFiles, read_json

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

log = logging.getLogger(__name__)

#: Changes when a file means something else.
_FORMAT = 1
#: What makes a model of its files: another release may do that otherwise.
_MAKERS = ("sentence-transformers", "transformers", "tokenizers")
_WEIGHTS = "model.safetensors"
#: The tables of embeddings, as all architectures of the BERT family name them; DistilBERT has no types.
_WORDS, _PLACES, _TYPES = (f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
_NORM = "embeddings.LayerNorm"
#: Activations by transformers' names; None: exact GELU. Models with others are not kept.
_ACTIVATIONS = {"gelu": None, "relu": torch.nn.functional.relu, "silu": torch.nn.functional.silu}
#: The parts of a layer.
_PARTS = tuple(each.name for each in fields(Layer))
#: Texts of the comparison of modules, in tokens each.
_COMPARED = (1, 2, 7)


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a model prepares texts."""

    tokenizer: str  #: of the library, as JSON
    columns: list[str]  #: the model's inputs, without the attention mask
    keep: Side  #: the end of a text that is kept if it is too long
    max_tokens: int
    dim: int
    prompt: str  #: the model's default one; empty: none


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model that runs on packed tokens, with the modules that make a text's vector of its tokens'."""

    rules: TextRules
    weights: Weights
    rest: list[torch.nn.Module]


def kept_model(files: ModelFiles, host: Host) -> PackedModel | None:
    """The model as it was kept on this machine, or by us for a known model; None if it was not."""
    path = _path(files, host)
    data = kept(path) or shipped(f"{files.fingerprint}-{_FORMAT}.json")
    if data is None:
        return None
    try:
        return _read(files.folder, json.loads(data))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        log.warning("%s is damaged and is made again: %r", path, error)
        return None


def keep_model(files: ModelFiles, host: Host, model: SentenceTransformer, packed: PackedModel) -> PackedModel | None:
    """Keep a model that sentence-transformers has loaded for :func:`kept_model`, which then gives the same as this.

    None if it is not one that can be kept, or the cache can't be written to, which is logged.
    """
    try:
        facts = _facts(files.folder, model, packed)
        same = None if facts is None else _read(files.folder, facts)
        if same is None or not (_same_weights(same.weights, packed.weights) and _same_rest(same, packed)):
            return None
        if host.build:
            keep(_path(files, host), json.dumps(facts).encode())
    except (LookupError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        # Its files have another form than those that we read, and sentence-transformers read them.
        log.debug("model %s is not kept: %r", files.name, error)
        return None
    except (OSError, ModelError) as error:
        log.info("what was made of model %s can't be kept, so the next start takes as long: %s", files.name, error)
        return None
    return same


def _path(files: ModelFiles, host: Host) -> Path:
    facts = json.dumps([_FORMAT, *map(version, _MAKERS)])
    return host.cache / "loaded" / f"{files.fingerprint}-{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"


def _facts(folder: Path, model: SentenceTransformer, packed: PackedModel) -> dict[str, Any] | None:
    """What the file holds; None for a model that is not kept."""
    modules = read_json(folder / "modules.json")
    transformer: Any = model[0].auto_model
    activation = transformer.config.to_dict().get("hidden_act", getattr(transformer.config, "activation", None))
    rest = [_facts_of(module, at, modules) for at, module in enumerate(packed.rest, 1)]
    if modules is None or activation not in _ACTIVATIONS or None in rest:
        return None
    file = str(Path(modules[0]["path"]) / _WEIGHTS)
    with safe_open(folder / file, framework="pt") as tensors:
        there = set(tensors.keys())
    prefix = "" if _WORDS in there else f"{transformer.base_model_prefix}."
    names = {id(module): prefix + name for name, module in transformer.named_modules()}
    weights, rules = packed.weights, asdict(packed.rules)
    if _plain(folder, rules["tokenizer"]):
        rules["tokenizer"] = None
    return {
        "rules": rules,
        "file": file,
        "prefix": prefix,
        "types": prefix + _TYPES in there,
        "eps": weights.norm.eps,
        "layers": [
            {each.name: names[id(getattr(layer, each.name))] for each in fields(Layer)} for layer in weights.layers
        ],
        "heads": weights.heads,
        "padding_id": weights.padding_id,
        "activation": activation,
        "rest": rest,
    }


def _facts_of(module: Any, at: int, modules: Any) -> dict[str, Any] | None:
    """What is kept of a module after the transformer; None if it does more than ours do."""
    match type(module).__name__:
        case "Pooling":
            modes = [module.pooling_mode] if isinstance(module.pooling_mode, str) else list(module.pooling_mode)
            return {"modes": modes} if module.include_prompt and MODES.issuperset(modes) else None
        case "Normalize":
            return {}
        case "Dense":
            names, activation = (module.module_input_name, module.module_output_name), type(module.activation_function)
            if (
                module.use_residual
                or set(names) != {"sentence_embedding"}
                or not hasattr(torch.nn, activation.__name__)
            ):
                return None
            return {"file": str(Path(modules[at]["path"]) / _WEIGHTS), "activation": activation.__name__}
        case "FirstDimensions":
            return {"dimensions": module.dimensions}
    return None


def _plain(folder: Path, tokenizer: str) -> bool:
    """Whether a tokenizer is that of the model's file; how it cuts and pads does not count."""
    path = folder / "tokenizer.json"
    return path.is_file() and _bare(Tokenizer.from_file(str(path))) == _bare(Tokenizer.from_str(tokenizer))


def _bare(tokenizer: Tokenizer) -> str:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.to_str()


def _read(folder: Path, facts: Mapping[str, Any]) -> PackedModel:
    """The model that these facts and the files of the folder make."""
    rules = dict(facts["rules"])
    if rules["tokenizer"] is None:
        rules["tokenizer"] = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tables = _Tables(folder / facts["file"], facts["eps"])
    prefix = facts["prefix"]
    places = tables.table(prefix + _PLACES)
    weights = Weights(
        words=tables.table(prefix + _WORDS),
        places=places + tables.table(prefix + _TYPES)[0] if facts["types"] else places,
        norm=tables.module(prefix + _NORM),
        layers=[Layer(**{part: tables.module(name) for part, name in layer.items()}) for layer in facts["layers"]],
        heads=facts["heads"],
        padding_id=facts["padding_id"],
        activation=_ACTIVATIONS[facts["activation"]],
    )
    return PackedModel(TextRules(**rules), weights, [_module(folder, each) for each in facts["rest"]])


def _module(folder: Path, facts: Mapping[str, Any]) -> torch.nn.Module:
    if "modes" in facts:
        return Pooled(facts["modes"])
    if "dimensions" in facts:
        return FirstDimensions(facts["dimensions"])
    if "file" in facts:
        return Projected(_Tables(folder / facts["file"]).module("linear"), getattr(torch.nn, facts["activation"])())
    return Normalized()


class _Tables:
    """The weights of a file, copied in float32."""

    def __init__(self, path: Path, eps: float = 0.0) -> None:
        tensors: Any = safe_open(path, framework="pt")
        self._tensors, self._names = tensors, frozenset(tensors.keys())
        self._eps = eps

    def table(self, name: str) -> torch.Tensor:
        # A copy: the file is mapped, and may be replaced while the model runs.
        values: torch.Tensor = self._tensors.get_tensor(name).to(torch.float32, copy=True)
        return values

    def module(self, name: str) -> Any:
        """A linear layer; a LayerNorm if it has one weight for each input."""
        state = {part: self.table(f"{name}.{part}") for part in ("weight", "bias") if f"{name}.{part}" in self._names}
        sizes = state["weight"].shape
        made: torch.nn.Module
        if len(sizes) == 1:
            made = torch.nn.LayerNorm(sizes[0], self._eps, device="meta")
        else:
            made = torch.nn.Linear(sizes[1], sizes[0], bias="bias" in state, device="meta")
        made.load_state_dict(state, assign=True)
        return made.requires_grad_(False)


def _same_weights(one: Weights, other: Weights) -> bool:
    return all(
        first.shape == second.shape and torch.equal(first, second)
        for first, second in zip(_tensors(one), _tensors(other), strict=True)
    ) and {norm.eps for norm in _norms(other)} == {one.norm.eps}


def _tensors(weights: Weights) -> list[torch.Tensor]:
    parts = [weights.norm, *(getattr(layer, part) for layer in weights.layers for part in _PARTS)]
    return [weights.words, weights.places, *(values for part in parts for values in (part.weight, part.bias))]


def _norms(weights: Weights) -> list[torch.nn.LayerNorm]:
    return [weights.norm, *(norm for layer in weights.layers for norm in (layer.attention_norm, layer.norm))]


def _same_rest(one: PackedModel, other: PackedModel) -> bool:
    """Whether the modules give the same vectors of a few texts; the tokens' vectors are any."""
    first, second = _rest_of(one), _rest_of(other)
    return first.shape == second.shape and torch.allclose(first, second, rtol=0, atol=1e-6)


def _rest_of(model: PackedModel) -> torch.Tensor:
    offsets = torch.tensor([0, *_COMPARED]).cumsum(0)
    size = (1, int(offsets[-1]), model.weights.words.shape[1])
    features: dict[str, Any] = {
        "token_embeddings": torch.sin(torch.arange(size[1] * size[2], dtype=torch.float32)).reshape(size),
        "cu_seq_lens_q": offsets,
    }
    with torch.inference_mode():
        for module in model.rest:
            features = module(features)
    vectors: torch.Tensor = features["sentence_embedding"]
    return vectors

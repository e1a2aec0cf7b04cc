"""What sentence-transformers made of a model, kept for the next start, which then need not import it.

That import takes five times as long as torch's own, and torch is not needed either where our own code computes. A kept
model is one that runs on packed tokens, and whose files give the same weights, by the names that were kept, as
sentence-transformers loaded. The accuracy gate compares its vectors with those of sentence-transformers at each start,
as with any other engine.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from embedctl_config.errors import ModelError
from embedctl_config.outputs import Output
from embedctl_workers.arrays.late import LateRules
from embedctl_workers.arrays.outputs import finished, side_by_side
from embedctl_workers.arrays.tokens import SCORED, Ragged, Rows, Side, Tokens, Vectors
from embedctl_workers.backends.torch.packed.modules import (
    MODES,
    Rest,
    Step,
    first_dimensions,
    in_turn,
    normalized,
    of_tokens,
    pooled,
    projected,
)
from embedctl_workers.backends.torch.packed.weights import Floats, Layer, Part, Weights
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
#: Activations that a kept model may have, by the names of transformers and of torch.
_ACTIVATIONS = ("gelu", "relu", "silu")
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
    width: int = 0  #: of what a model gives without dense vectors, as in :attr:`.base.Backend.widths`
    late: LateRules | None = None  #: of a model that gives multi-vectors alone


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model that runs on packed tokens, with what makes a text's vector of its tokens'."""

    rules: TextRules
    weights: Weights
    rest: Rest
    #: what makes another output of tokens' vectors, if the model gives no dense vectors
    heads: Mapping[Output, Any] = field(default_factory=dict)


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


def keep_model(
    files: ModelFiles, host: Host, model: SentenceTransformer, rules: TextRules, found: tuple[Weights, Sequence[Any]]
) -> PackedModel | None:
    """Keep a model that sentence-transformers has loaded for :func:`kept_model`, which then gives the same as this.

    `found` is what :func:`.packed.packable.packable` makes of it. None if it is not one that can be kept, or the cache
    can't be written to, which is logged.
    """
    weights, rest = found
    try:
        facts = _facts(files.folder, model, rules, weights, rest)
        same = None if facts is None else _read(files.folder, facts)
        if same is None or not (_same_weights(same.weights, weights) and _same_after(same, model, rest)):
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


def _facts(
    folder: Path, model: SentenceTransformer, text_rules: TextRules, weights: Weights, rest: Sequence[Any]
) -> dict[str, Any] | None:
    """What the file holds; None for a model that is not kept."""
    from embedctl_workers.backends.torch.packed.packable import heads_of

    modules = read_json(folder / "modules.json")
    transformer: Any = model[0].auto_model
    heads: Mapping[Output, Any] = heads_of(model)
    activation = transformer.config.to_dict().get("hidden_act", getattr(transformer.config, "activation", None))
    after = [_facts_of(module, at, modules, "sentence_embedding") for at, module in enumerate(rest, 1)]
    if Output.MULTI in heads:
        others = [(at, each) for at, each in enumerate(model) if at and type(each).__name__ != "MultiVectorMask"]
        after = [_facts_of(module, at, modules, "token_embeddings") for at, module in others]
    if modules is None or activation not in _ACTIVATIONS or None in after:
        return None
    file = str(Path(modules[0]["path"]) / _WEIGHTS)
    with safe_open(folder / file, framework="np") as tensors:
        there = set(tensors.keys())
    prefix = "" if _WORDS in there else f"{transformer.base_model_prefix}."
    names = {place: name for place, name in _named(transformer, prefix) if name in there}
    rules = asdict(text_rules)
    if _plain(folder, rules["tokenizer"]):
        rules["tokenizer"] = None
    return {
        "rules": rules,
        "file": file,
        "prefix": prefix,
        "types": prefix + _TYPES in there,
        "eps": weights.norm.eps,
        "layers": [
            {part: names[getattr(layer, part).weight.ctypes.data].removesuffix(".weight") for part in _PARTS}
            for layer in weights.layers
        ],
        "heads": weights.heads,
        "padding_id": weights.padding_id,
        "activation": activation,
        "rest": after,
        "splade": heads[Output.SPARSE].facts(names) if Output.SPARSE in heads else None,
    }


def _named(transformer: Any, prefix: str) -> Iterator[tuple[int, str]]:
    """The places of weights in memory, where the model's own are those of its layers, and their names in a file. A
    weight may have two names."""
    for name, each in transformer.named_parameters(remove_duplicate=False):
        yield each.data_ptr(), name
    for name, each in transformer.base_model.named_parameters():
        yield each.data_ptr(), prefix + name


def _facts_of(module: Any, at: int, modules: Any, of: str) -> dict[str, Any] | None:
    """What is kept of a module after the transformer, which takes and gives these vectors; None if it does more than
    ours do."""
    match type(module).__name__:
        case "Pooling":
            modes = [module.pooling_mode] if isinstance(module.pooling_mode, str) else list(module.pooling_mode)
            return {"modes": modes} if module.include_prompt and MODES.issuperset(modes) else None
        case "Normalize":
            return {}
        case "Dense":
            names, activation = (module.module_input_name, module.module_output_name), type(module.activation_function)
            known = activation.__module__ == "torch.nn.modules.activation" or activation.__name__ == "Identity"
            if module.use_residual or set(names) != {of} or not known:
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
    late = rules.pop("late", None)
    tables = _Tables(folder / facts["file"], facts["eps"])
    prefix = facts["prefix"]
    places = tables.table(prefix + _PLACES)
    weights = Weights(
        words=tables.table(prefix + _WORDS),
        places=places + tables.table(prefix + _TYPES)[0] if facts["types"] else places,
        norm=tables.part(prefix + _NORM),
        layers=[Layer(**{part: tables.part(name) for part, name in layer.items()}) for layer in facts["layers"]],
        heads=facts["heads"],
        padding_id=facts["padding_id"],
        activation=None if facts["activation"] == "gelu" else _torch_function(facts["activation"]),
    )
    text_rules = TextRules(**rules, late=None if late is None else LateRules(**late))
    rest = in_turn([_step(folder, each) for each in facts["rest"]])
    heads: dict[Output, Any] = {}
    if facts.get("splade"):
        from embedctl_workers.backends.torch.packed.heads import Splade

        heads[Output.SPARSE] = Splade.read(tables.table, facts["splade"])
    if late is not None:
        heads[Output.MULTI] = of_tokens(rest)
    return PackedModel(text_rules, weights, rest, heads)


def _torch_function(name: str) -> Callable[[Any], Any]:
    import torch

    function: Callable[[Any], Any] = getattr(torch.nn.functional, name)
    return function


def _step(folder: Path, facts: Mapping[str, Any]) -> Step:
    if "modes" in facts:
        return pooled(facts["modes"])
    if "dimensions" in facts:
        return first_dimensions(facts["dimensions"])
    if "file" in facts:
        tables = _Tables(folder / facts["file"])
        return projected(tables.table("linear.weight"), tables.bias("linear"), _activation(facts["activation"]))
    return normalized


def _activation(name: str) -> Callable[[Vectors], Vectors]:
    """An activation by torch's name of its module."""
    if name in ("Identity", "Tanh"):
        return np.tanh if name == "Tanh" else lambda vectors: vectors
    import torch

    module = getattr(torch.nn, name)()
    return lambda vectors: np.asarray(module(torch.from_numpy(vectors)).detach())


class _Tables:
    """The weights of a file, copied in float32."""

    def __init__(self, path: Path, eps: float = 0.0) -> None:
        tensors: Any = safe_open(path, framework="np")
        self._path, self._tensors, self._names = path, tensors, frozenset(tensors.keys())
        self._eps = eps

    def table(self, name: str) -> Floats:
        # Not in the file's own memory, which may be replaced while the model runs: NumPy is given a copy.
        if self._tensors.get_slice(name).get_dtype() == "BF16":  # NumPy has no such type
            with safe_open(self._path, framework="pt") as tensors:
                return np.asarray(tensors.get_tensor(name).float())
        return np.asarray(self._tensors.get_tensor(name), np.float32)

    def bias(self, name: str) -> Floats | None:
        return self.table(f"{name}.bias") if f"{name}.bias" in self._names else None

    def part(self, name: str) -> Part:
        return Part(self.table(f"{name}.weight"), self.table(f"{name}.bias"), self._eps)


def _same_weights(one: Weights, other: Weights) -> bool:
    return all(
        np.array_equal(first, second) for first, second in zip(_tensors(one), _tensors(other), strict=True)
    ) and {norm.eps for norm in _norms(other)} == {one.norm.eps}


def _tensors(weights: Weights) -> list[Floats]:
    parts = [weights.norm, *(getattr(layer, part) for layer in weights.layers for part in _PARTS)]
    return [weights.words, weights.places, *(values for part in parts for values in (part.weight, part.bias))]


def _norms(weights: Weights) -> list[Part]:
    return [weights.norm, *(norm for layer in weights.layers for norm in (layer.attention_norm, layer.norm))]


def _same_after(one: PackedModel, model: Any, modules: Sequence[Any]) -> bool:
    """Whether what follows the layers makes the same of a few texts as the model's own modules; the tokens' vectors are
    any."""
    from embedctl_workers.backends.torch.packed.packable import heads_of, rest_of

    offsets: Rows = np.cumsum([0, *_COMPARED])
    size = int(offsets[-1]), one.weights.words.shape[1]
    states = np.sin(np.arange(size[0] * size[1], dtype=np.float32)).reshape(size)
    lengths = np.array(_COMPARED)
    tokens = Tokens(lengths, 0 * lengths, {SCORED: Ragged(np.ones(size[0], np.int32), offsets)})
    ours, theirs = (
        finished(
            {output: head(states, tokens, np.arange(len(lengths))) for output, head in heads.items()}, normalize=False
        )[:, 0]
        if heads
        else rest(states, offsets, None)
        for heads, rest in ((one.heads, one.rest), (heads_of(model), rest_of(modules)))
    )
    return all(np.allclose(*each, rtol=0, atol=1e-6) for each in zip(*side_by_side(ours, theirs), strict=True))

"""What a model gives of a text, by its own files; refuses those that give nothing which embedctl encodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from embedctl_config.errors import ModelError
from embedctl_config.outputs import PLAIN, Output

_PLAIN = "SentenceTransformer"
_SPARSE: tuple[Output, ...] = (Output.SPARSE,)
_MULTI: tuple[Output, ...] = (Output.MULTI,)
_PAIRS = "scores pairs of texts (a reranker): sentence_transformers.CrossEncoder computes that"
_BARE_SPARSE = "is for sparse vectors: save it with sentence_transformers.SparseEncoder, and name that folder"
_BARE_TOKENS = "is for late interaction: save it with sentence_transformers.MultiVectorEncoder, and name that folder"
#: The kinds that `config_sentence_transformers.json` states.
_STATED = {"SparseEncoder": _SPARSE, "MultiVectorEncoder": _MULTI, "ColBERT": _MULTI, "CrossEncoder": (), _PLAIN: PLAIN}
#: Parts of sentence-transformers whose modules do not end in one vector of a text.
_PARTS = {"sparse_encoder": _SPARSE, "cross_encoder": (), "multi_vector_encoder": _MULTI}
#: The modules, by the ends of their names, that each kind may have: ours compute what these do.
_MODULES = {
    _SPARSE: ("Transformer", "MLMTransformer", "SpladePooling"),
    _MULTI: ("Transformer", "Dense", "MultiVectorMask", "Normalize"),
}
#: What an architecture of transformers is for, by a part of its name.
_HEADS = {
    "ForSequenceClassification": _PAIRS,
    **dict.fromkeys(("ColBERT", "ColPali", "ColQwen", "ColIdefics"), _BARE_TOKENS),
    "Splade": _BARE_SPARSE,
    "ForTokenClassification": "labels the words of a text",
    "ForQuestionAnswering": "marks answers in a text",
    "ForMultipleChoice": "chooses between answers",
    **dict.fromkeys(("ForConditionalGeneration", "EncoderDecoder"), "writes text"),
}
#: Any other end than the next word, or a word that is left out.
_END = re.compile(r"For(?!CausalLM|MaskedLM|PreTraining)([A-Z]\w+)")
_SOUND = {"num_mel_bins", "conv_dim", "audio_config"}
#: What the configuration of a model that reads something else says → what it reads.
_MEDIA = {
    **dict.fromkeys(_SOUND, "sound"),
    **dict.fromkeys(("patch_size", "image_size", "num_channels", "vision_config"), "images"),
}


def outputs_stated(read: Callable[[str], Any], modules: object, place: str) -> tuple[Output, ...]:
    """What a model gives of a text.

    A ModelError for a cross-encoder, a sparse encoder or a model of late interaction with modules that embedctl does
    not compute, a model that reads images or sound, and a bare model of transformers with a head for another end than a
    vector or the next word.

    Args:
        read: gives the parsed JSON of a file by its name in the model's folder, None if there is none; may raise
            ValueError.
        modules: the contents of `modules.json`. If there is one, its modules decide, and not the transformer's head.
        place: names the model in messages.
    """
    config = _object(read("config_sentence_transformers.json"))
    # Before it stated a type, PyLate wrote the markers of queries and documents.
    stated = config.get("model_type", "ColBERT" if "document_prefix" in config else _PLAIN)
    outputs = _STATED.get(str(stated))
    if not outputs:
        why = "is no SentenceTransformer" if outputs is None else _PAIRS
        raise _refusal(f"{place} is a {stated}", why)
    if modules is None:
        config = _object(read("config.json"))
        _refuse_bare(config, place)
        _refuse_media(config, place)
        return outputs
    for module in modules if isinstance(modules, list) else []:
        if str(_object(module).get("type")).endswith(".Transformer"):
            config = _object(read(str(PurePosixPath(module.get("path", ""), "config.json"))))
            if "text_config" not in config and ("vocab_size" not in config or _SOUND & config.keys()):
                _refuse_media(config, place)
        part = str(_object(module).get("type", "")).split(".")[1:2]
        if part and part[0] in _PARTS:
            outputs = _PARTS[part[0]]
            if not outputs:
                raise _refusal(f"{place} has the module {module['type']}", _PAIRS)
    _refuse_modules(modules, outputs, place)
    return outputs


def _refuse_modules(modules: object, outputs: tuple[Output, ...], place: str) -> None:
    for module in modules if isinstance(modules, list) and outputs in _MODULES else []:
        if str(_object(module).get("type")).rpartition(".")[2] not in _MODULES[outputs]:
            raise ModelError(
                f"{place} has the module {module['type']}, which embedctl does not compute: of models for "
                f"{outputs[0]} vectors, it runs those of {', '.join(_MODULES[outputs])}"
            )


def _refuse_bare(config: dict[str, Any], place: str) -> None:
    for architecture in map(str, config.get("architectures") or ()):
        what = next((what for part, what in _HEADS.items() if part in architecture), None)
        if what is None and (end := _END.search(architecture)):
            what = f"is for {end[1]}: transformers.{architecture} computes that"
        if what is not None:
            raise _refusal(
                f"{place} is a {architecture}",
                f"{what}. If its vectors are good for search nonetheless, save it with the pooling that its authors "
                "name, as docs/models.md shows",
            )


def _refuse_media(config: dict[str, Any], place: str) -> None:
    if medium := next((medium for name, medium in _MEDIA.items() if name in config), None):
        why = f"reads {medium}: transformers.AutoModel computes vectors of them"
        raise _refusal(f"{place} is a model for {medium} ({config.get('model_type')})", why)


def check_pooling(read: Callable[[str], Any], place: str, pooling: str) -> None:
    """Refuse (ModelError) a bare model, if nobody says how one vector of a text is made, and a pooling beside the
    one that a model states; the arguments are those of :func:`outputs_stated`."""
    bare = read("modules.json") is None
    if pooling and not bare:
        raise ModelError(f"{place} states its own modules, so it takes no other pooling: omit pooling {pooling}")
    if bare and not pooling:
        architectures = _object(read("config.json")).get("architectures") or ["bare model"]
        raise ModelError(
            f"{place} is a {architectures[0]}, which states no pooling: nothing tells how a text's vector is made. If "
            "its authors made it for embeddings, say once what they name, as --pooling mean|cls|last, or as pooling in "
            "its entry [models.NAME]. Otherwise transformers reads it, for what it was made for"
        )


def _refusal(what: str, why: str) -> ModelError:
    return ModelError(f"{what}, and embedctl encodes vectors of texts alone: such a model {why}")


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

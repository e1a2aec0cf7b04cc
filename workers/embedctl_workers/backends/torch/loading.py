"""Loads a sentence-transformers model, and refuses one whose vectors would not be its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from embedctl_config.errors import ModelError
from embedctl_config.outputs import Output
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.opening import open_model

#: The inputs that are made of a text.
_INPUTS = {"input_ids", "token_type_ids", "attention_mask"}


class FirstDimensions(torch.nn.Module):
    """The last module of a model with a `truncate_dim`; sentence-transformers does this in `encode`."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "sentence_embedding": features["sentence_embedding"][:, : self.dimensions]}


def modules_of(model: Any) -> list[torch.nn.Module]:
    """A model's modules, but for that which says which tokens of a text are scored: tokens say so."""
    # Known by its name, because the release that optimum needs has no such class.
    return [each for each in model if type(each).__name__ != "MultiVectorMask"]


def load_sentence_transformer(files: ModelFiles) -> SentenceTransformer:
    """Load a model in fp32 on the CPU, from its files alone and without running any code in them.

    A ModelError if it can't be loaded, or its files lack weights.
    """
    disable_progress_bar()  # it would fill the log
    try:
        with _reports() as reports:
            model = open_model(files.folder, files.pooling, files.outputs)
    except Exception as error:  # a model's files can make transformers raise anything
        raise ModelError(f"model {files.name!r} in {files.folder} can't be loaded: {_in_one_line(error)}") from error
    _refuse_missing(files, model, reports)
    if truncated := getattr(model, "truncate_dim", None):
        model.append(FirstDimensions(truncated))
    return model.float().eval()


def _in_one_line(error: Exception) -> str:
    """The first line of an error's message, or its kind if it has none."""
    if "ignore_mismatched_sizes" in str(error):  # transformers' own sentence names a way to random weights
        return "its weights have other shapes than config.json states"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _reports() -> Iterator[list[Mapping[str, Any]]]:
    """What transformers reports of each model that it loads here; sentence-transformers does not ask for it."""
    reports: list[Mapping[str, Any]] = []
    plain = PreTrainedModel.__dict__["from_pretrained"]

    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **options: Any) -> PreTrainedModel:
        model: PreTrainedModel
        model, report = plain.__func__(cls, *args, **{**options, "output_loading_info": True})
        reports.append(report)
        return model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield reports
    finally:
        PreTrainedModel.from_pretrained = plain


def _refuse_missing(files: ModelFiles, model: SentenceTransformer, reports: list[Mapping[str, Any]]) -> None:
    """Refuse a model (ModelError) that has weights which take part in the vectors and are not in its files.

    transformers fills in random numbers, others in each process. The accuracy gate would fail, and could not say why.
    """
    missing = {str(name) for report in reports for name in report["missing_keys"]}
    if Output.DENSE not in files.outputs or any(isinstance(part, Pooling) for part in model.modules()):
        missing = {name for name in missing if "pooler" not in name}  # it is not used, and often left out
    if missing:
        kind = type(getattr(model[0], "auto_model", model[0])).__name__
        raise ModelError(
            f"model {files.name!r}: {files.folder} lacks {len(missing)} weights of {kind}, such as {min(missing)}: its "
            "files are incomplete, or those of another architecture than config.json states. Get it again, or choose "
            "another model"
        )


def fast_tokenizer(model: SentenceTransformer, files: ModelFiles) -> PreTrainedTokenizerFast:
    """The model's fast tokenizer.

    A ModelError if it has none, or is not a text model, or prepares texts in another way than by its tokenizer alone.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not model.supports("text"):
        if not isinstance(model[0], Transformer):
            raise ModelError(
                f"model {files.name!r} begins with the module {type(model[0]).__name__}, which embedctl does not run: "
                "choose a model that begins with a transformer"
            )
        raise ModelError(
            f"model {files.name!r}: this backend needs a text model with a fast tokenizer (tokenizer.json), not "
            f"{type(tokenizer).__name__}"
        )
    if model.supports("message"):
        raise ModelError(
            f"model {files.name!r} puts each text into its tokenizer's chat template, which embedctl does not do: "
            "choose a model that was saved by sentence-transformers for texts"
        )
    if options := _preparing_options(model[0]):
        raise ModelError(
            f"model {files.name!r} sets {options} in its processing_kwargs, which embedctl does not follow: choose "
            "another model, or save a copy without them if its vectors need none"
        )
    if unknown := set(tokenizer.model_input_names) - _INPUTS:
        raise ModelError(
            f"model {files.name!r} takes {', '.join(sorted(unknown))} beside the tokens of a text, which embedctl does "
            "not make: choose a model of texts alone"
        )
    return tokenizer


def _preparing_options(first: Any) -> str:
    """The options of a model for its tokenizer that change what a text becomes; empty if there are none."""
    options: Mapping[str, Any] = getattr(first, "processing_kwargs", {})
    return ", ".join(f"{part}.{name}" for part in ("common", "text") for name in options.get(part) or {})

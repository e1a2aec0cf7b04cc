"""Exports a sentence-transformers model as one ONNX graph, from token ids to vectors. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from transformers import AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from embedctl_config.errors import ModelError
from embedctl_config.outputs import PLAIN, Output
from embedctl_workers.arrays.late import LateRules
from embedctl_workers.backends.onnx.inputs import GRAPH, MODEL, OUTPUT, POOLING_MASK, TOKENIZER, ModelFacts, name_of
from embedctl_workers.backends.torch.loading import fast_tokenizer, load_sentence_transformer, modules_of
from embedctl_workers.backends.torch.packed.heads import Lexical, Projection, heads_beside, unused_of
from embedctl_workers.models.facts import longest_text
from embedctl_workers.models.files import ModelFiles

#: From opset 17 on, LayerNormalization is a single operator.
_OPSET = 17
#: The example that is traced: two texts of these lengths, so that there is padding for the graph to mask.
_EXAMPLE = (7, 4)


def export_own(files: ModelFiles, folder: Path) -> None:
    """Write the graph, made by `torch.onnx`, and what a worker needs; a ModelError if the model can't be exported."""
    model = load_sentence_transformer(files)
    tokenizer = fast_tokenizer(model, files)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # The optimiser recognises attention by its products and its softmax, which torch's fused attention hides.
            part.set_attn_implementation("eager")
    heads = heads_beside(files, tokenizer.backend_tokenizer)
    names = write_facts(folder, files, model, tokenizer, heads)
    outputs = [name_of(output, files.outputs) for output in files.outputs]
    axes = {name: {0: "texts"} if name == OUTPUT else {0: "texts", 1: "tokens"} for name in (*names, *outputs)}
    with torch.inference_mode(), _traceable_masks():
        torch.onnx.export(
            WholeModel(model, names, heads),
            tuple(example_of(name, tokenizer, _EXAMPLE, max(_EXAMPLE)) for name in names),
            str(folder / GRAPH),
            input_names=names,
            output_names=outputs,
            dynamic_axes=axes,
            opset_version=_OPSET,
            dynamo=False,
        )


def export_optimum(files: ModelFiles, folder: Path) -> None:
    """The same by optimum; a ModelError if pooling leaves out the prompt: its graphs have no input for that."""
    from optimum.exporters.onnx import main_export

    model = load_sentence_transformer(files)
    tokenizer = fast_tokenizer(model, files)
    if pooling_excludes_prompt(model, files):
        raise ModelError(f"model {files.name!r} leaves the prompt out of its pooling, and optimum's graphs can't")
    if files.outputs != PLAIN:
        raise ModelError(f"model {files.name!r} gives {', '.join(files.outputs)} vectors, and optimum's graphs can't")
    if files.pooling:
        raise ModelError(f"model {files.name!r} states no pooling, and optimum takes none: export it without optimum")
    scratch = folder / "optimum"
    main_export(
        str(files.folder),
        output=scratch,
        task="feature-extraction",
        library_name="sentence_transformers",
        do_validation=False,
        local_files_only=True,
    )
    for path in scratch.glob("model.onnx*"):
        path.rename(folder / path.name)
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()
    write_facts(folder, files, model, tokenizer)


EXPORTERS: Mapping[str, Callable[[ModelFiles, Path], None]] = {"own": export_own, "optimum": export_optimum}


@contextmanager
def _traceable_masks() -> Iterator[None]:
    """A context in which transformers makes every attention mask by broadcasting.

    It makes those that are joined of several by vmap, which can't be traced. Gemma's attention to both sides has such.
    """
    before = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    AttentionMaskInterface.register("eager", lambda *args, **facts: before(*args, **{**facts, "use_vmap": False}))
    try:
        yield
    finally:
        AttentionMaskInterface.register("eager", before)


class WholeModel(torch.nn.Module):
    """All modules of a model as one, with tensors as arguments, as tracing requires; and its heads beside them."""

    def __init__(
        self,
        model: SentenceTransformer,
        names: Sequence[str],
        heads: Mapping[Output, Lexical | Projection] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._model = model
        self._names = names
        self._heads = heads

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The vectors of texts, or of tokens of a model of late interaction; with heads a tuple of them and theirs."""
        features: dict[str, Any] = {**dict(zip(self._names, inputs, strict=True)), "modality": "text"}
        pooling_mask = features.pop(POOLING_MASK, None)
        first, *others = modules_of(self._model)
        features = first(features)
        if pooling_mask is not None:
            features["attention_mask"] = pooling_mask
        for module in others:
            features = module(features)
        # Models of late interaction pool nothing; CLIP has no vectors of tokens.
        vectors = features[OUTPUT] if OUTPUT in features else features["token_embeddings"]
        of_tokens = [head.of_tokens(features["token_embeddings"]) for head in self._heads.values()]
        return (vectors, *of_tokens) if of_tokens else vectors


def pooling_excludes_prompt(model: SentenceTransformer, files: ModelFiles) -> bool:
    """Whether pooling leaves out the tokens of the prompt; a ModelError if it also weights tokens by position."""
    pooling = [part for part in model if getattr(part, "include_prompt", True) is False]
    for part in pooling:
        modes = getattr(part, "pooling_mode", "")
        if "weightedmean" in (modes if isinstance(modes, tuple) else (modes,)):
            raise ModelError(
                f"model {files.name!r} weights tokens by position and leaves out the prompt; such a model has no graph "
                'here: use a class with backend = "torch"'
            )
    return bool(pooling)


def example_of(name: str, tokenizer: PreTrainedTokenizerFast, lengths: Sequence[int], width: int) -> torch.Tensor:
    """An input to trace a model with, int64, rows × width: rows of these lengths, then padding."""
    rows = len(lengths)
    if name == "token_type_ids":
        return torch.zeros(rows, width, dtype=torch.int64)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).to(torch.int64)
    if name != "input_ids":
        return mask
    # Any tokens will do; those in the middle of the vocabulary are not special tokens.
    ids = torch.arange(rows * width).reshape(rows, width) + len(tokenizer) // 2
    return torch.where(mask == 1, ids % len(tokenizer), tokenizer.pad_token_id or 0)


def write_facts(
    folder: Path,
    files: ModelFiles,
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    heads: Mapping[Output, Lexical | Projection] = MappingProxyType({}),
) -> list[str]:
    """Write the tokenizer and the facts that a worker needs into an artefact's folder; the graph's inputs by name."""
    excludes_prompt = pooling_excludes_prompt(model, files)
    default = model.default_prompt_name
    longest = longest_text(model)
    late = LateRules.of(model, longest) if files.outputs == (Output.MULTI,) else None
    dim = int(model.encode(["a"], show_progress_bar=False)[0].shape[-1])
    dense = Output.DENSE in files.outputs
    facts = ModelFacts(
        dim=dim if dense else 0,
        max_tokens=longest if late is None else late.longest_document,
        keep="left" if tokenizer.truncation_side == "right" else "right",
        fillers={"input_ids": tokenizer.pad_token_id or 0, "token_type_ids": tokenizer.pad_token_type_id},
        prompt=(model.prompts.get(default) or "") if default is not None else "",
        excludes_prompt=excludes_prompt,
        special_ids=sorted(set(tokenizer.all_special_ids)),
        outputs=files.outputs,
        widths={output: head.width for output, head in heads.items()} if dense else {files.outputs[0]: dim},
        late=late,
        unused=unused_of(heads),
    )
    (folder / MODEL).write_text(facts.to_json(), encoding="utf-8")
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER))
    names = [name for name in tokenizer.model_input_names if name != "attention_mask"]
    return [*names, "attention_mask", *([POOLING_MASK] if excludes_prompt else [])]

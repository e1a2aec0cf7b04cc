"""Opens a model with sentence-transformers, for the backends and for the references that these are held to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Pooling

from embedctl_config.outputs import PLAIN, Output

#: The values of a model's entry → the names of the mode.
_MODES: Mapping[str, str] = {"mean": "mean", "cls": "cls", "last": "lasttoken"}


def open_model(folder: Path, pooling: str, outputs: tuple[Output, ...] = PLAIN) -> SentenceTransformer:
    """A model that gives these outputs, in fp32 on the CPU, from its files alone and without running any code in them;
    with this pooling if they state none. Raises whatever sentence-transformers and transformers raise."""
    kind: Any = SentenceTransformer
    if Output.SPARSE in outputs and Output.DENSE not in outputs:
        kind = SparseEncoder
    elif Output.DENSE not in outputs:
        from sentence_transformers import MultiVectorEncoder  # the release that optimum needs has none

        kind = MultiVectorEncoder
    model: SentenceTransformer = kind(
        str(folder),
        device="cpu",
        local_files_only=True,
        trust_remote_code=False,
        model_kwargs={"dtype": torch.float32},
    )
    if pooling:  # in the place of the mean that a model without modules gets
        model[1] = Pooling(model.get_embedding_dimension(), pooling_mode=_MODES[pooling])
    return model

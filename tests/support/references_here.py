"""Computes references in this process or in a fork, which have the libraries, instead of in a new process."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.machine.host import Host
from embedctl_workers.models import references
from embedctl_workers.models.files import ModelFiles, resolve_model
from embedctl_workers.models.references import References
from tests.support.forked import status_of_fork


@functools.cache
def sentence_transformer(folder: Path) -> Any:
    """The model of a folder, in fp32. sentence-transformers loads it once per process."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(
        str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"}
    ).eval()


def by_torch(folder: Path, texts: Sequence[str], **options: Any) -> Vectors:
    """The vectors of texts by sentence-transformers, each encoded alone."""
    return np.asarray(sentence_transformer(folder).encode(list(texts), batch_size=1, **options))


def compute_here(files: ModelFiles, host: Host, path: Path) -> References | None:
    """Stands in for `embedctl_workers.models.references._compute`."""
    before, sys.argv = sys.argv, ["references", str(files.folder), str(path), files.pooling, ",".join(files.outputs)]
    try:
        references.main()
    finally:
        sys.argv = before
    return references._load(path, files.outputs)


def stand_in() -> None:
    """Let this fork compute references itself, where its host may build them."""
    real = references._compute

    def compute(files: ModelFiles, host: Host, path: Path) -> References:
        here = compute_here(files, host, path) if host.build else None
        return here or real(files, host, path)

    references._compute = compute


def keep_references(folder: Path | str, cache: Path | str) -> None:
    """Compute the references of a model in a fork, so that workers with this cache find them."""
    status = status_of_fork(_keep_references, str(folder), str(cache), model=True)
    assert status == 0, f"the references' process ended with {status}"


def _keep_references(folder: str, cache: str) -> None:
    stand_in()
    references.references_for(resolve_model(folder), Host(threads=1, cache=Path(cache)))


def expected_vectors(folder: Path | str, texts: Sequence[str], **options: Any) -> Vectors:
    """The normalised vectors of texts by sentence-transformers, computed in a fork.

    Args:
        options: of its `encode`; and `long`, of a job, as far as it says which end a text loses.
    """
    with tempfile.TemporaryDirectory() as own:
        path = Path(own, "vectors.npy")
        status = status_of_fork(_save_vectors, str(folder), list(texts), options, path, model=True)
        assert status == 0, f"sentence-transformers ended with {status}"
        vectors: Vectors = np.load(path)
        return vectors


def _save_vectors(folder: str, texts: list[str], options: dict[str, Any], path: Path) -> None:
    model = sentence_transformer(Path(folder))
    if long := options.pop("long", None):
        model.tokenizer.truncation_side = long.removeprefix("cut-")
    np.save(path, model.encode(texts, normalize_embeddings=True, show_progress_bar=False, **options))

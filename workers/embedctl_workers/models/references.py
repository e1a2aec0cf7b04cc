"""Reference vectors: the gate's texts encoded by torch in fp32, computed once for each model and kept in the cache.

`python -m embedctl_workers.models.references FOLDER FILE` computes them in a process of its own, so that a worker with
another runtime never imports torch. It calls sentence-transformers as any user does.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from embedctl.common.processes import running
from embedctl_config.errors import MissingExtra, ModelError
from embedctl_config.outputs import Output, outputs_of
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import keep, kept, locked, private_folder, shipped
from embedctl_workers.models.facts import longest_text
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import PROMPT, TEXTS

log = logging.getLogger(__name__)

#: Changes when the same texts give other vectors or another file.
_FORMAT = 1


def references_for(files: ModelFiles, host: Host, *, prompt: str | None = None) -> Vectors:
    """The model's own vectors of the gate's texts, from the cache, as shipped for a known model, or computed now, which
    takes some seconds.

    They are float32, texts × dimensions, not normalised unless the model itself does so. A prompt of None is the
    model's default; the only other one is the gate's, :data:`~.gate_texts.PROMPT`. Of a model without dense vectors,
    they are texts × words of its vocabulary, or texts × numbers of all vectors of a text's tokens, and then zeros; the
    other prompt of a multi-vector is that of queries.

    Raises:
        MissingExtra: they are not in the cache, and sentence-transformers is not installed.
        ModelError: they are not in the cache and can't be computed, or `host.build` forbids it; or another user can
            write to their folder.
    """
    path = references_path(files, host)
    vectors = _load(path)
    if vectors is None:
        try:
            private_folder(path.parent)
            with locked(path):
                vectors = _load(path) or _compute(files, host, path)
        except OSError as error:
            raise ModelError(f"the references of model {files.name!r} can't be kept in {path}: {error}") from error
    return vectors["plain" if prompt is None else "prompted"]


def references_path(files: ModelFiles, host: Host) -> Path:
    """The file with the references of a model; it may be copied to another machine."""
    facts = json.dumps([_FORMAT, PROMPT, *TEXTS.values()])
    return host.cache / "references" / f"{files.fingerprint}-{hashlib.sha256(facts.encode()).hexdigest()[:32]}.npz"


def _load(path: Path) -> dict[str, Vectors] | None:
    """The vectors of a file; None if there is none, or it is damaged or not trusted."""
    data = kept(path) or shipped(path.name)
    if data is None:
        return None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            vectors = {name: file[name] for name in ("plain", "prompted")}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        log.warning("%s is damaged and is made again: %s", path, error)
        return None
    if all(each.dtype == np.float32 and each.ndim == 2 and len(each) == len(TEXTS) for each in vectors.values()):
        return vectors
    log.warning("%s holds something else and is made again", path)
    return None


def _compute(files: ModelFiles, host: Host, path: Path) -> dict[str, Vectors]:
    if not host.build:
        raise ModelError(
            f"the references of model {files.name!r} are not in {path}, and --no-build forbids building them: "
            f"copy the file from a machine that has it, or run `embedctl model verify {files.name}`"
        )
    if find_spec("torch") is None or find_spec("sentence_transformers") is None:
        what = f"computing the references of model {files.name!r} (or copy {path} from a machine that has it)"
        raise MissingExtra("torch", what)
    log.info("model %s: computing its references, once on this machine", files.name)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / path.name
        with running(
            [sys.executable, "-m", __name__, str(files.folder), str(fresh), files.pooling, ",".join(files.outputs)],
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(host.threads)},
            text=True,
            errors="replace",
            umask=0o022,  # what other users may write to is not trusted
        ) as child:
            _, said = child.communicate()
        vectors = _load(fresh)
        if child.returncode or vectors is None:
            why = (said.strip() or f"status {child.returncode}").splitlines()[-1]
            raise ModelError(f"the references of model {files.name!r} can't be computed from {files.folder}: {why}")
        keep(path, fresh.read_bytes())
    return vectors


def main() -> None:
    from embedctl_workers.models.opening import open_model

    folder, path, pooling, outputs = sys.argv[1:]
    model: Any = open_model(Path(folder), pooling, outputs_of(outputs)).eval()
    longest = longest_text(model)
    if longest < (model.max_seq_length or longest):
        model.max_seq_length = longest  # it states more than it has positions for, and would fail with the longest text

    def encode(prompt: str | None) -> Vectors:
        # One text at a time: nothing is padded, so a reference depends on no other text.
        how = {"prompt": prompt, "batch_size": 1, "show_progress_bar": False}
        if Output.MULTI in outputs_of(outputs) and Output.DENSE not in outputs_of(outputs):
            of_tokens = model.encode_document if prompt is None else model.encode_query
            return _in_rows(of_tokens(list(TEXTS.values()), **{**how, "prompt": None}))
        vectors = model.encode(list(TEXTS.values()), **how)
        return np.asarray(vectors.to_dense() if hasattr(vectors, "to_dense") else vectors, np.float32)

    with Path(path).open("wb") as file:
        plain, prompted = encode(None), encode(PROMPT)
        columns = max(plain.shape[1], prompted.shape[1])
        plain, prompted = (np.pad(each, ((0, 0), (0, columns - each.shape[1]))) for each in (plain, prompted))
        np.savez_compressed(file, plain=plain, prompted=prompted)


def _in_rows(texts: Sequence[Any]) -> Vectors:
    rows = np.zeros((len(texts), max(text.numel() for text in texts)), np.float32)
    for row, text in zip(rows, texts, strict=True):
        row[: text.numel()] = text.numpy().reshape(-1)
    return rows


if __name__ == "__main__":
    main()

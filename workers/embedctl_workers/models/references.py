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
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from embedctl.common.processes import running
from embedctl_config.errors import MissingExtra, ModelError
from embedctl_config.outputs import PLAIN, Output, outputs_of
from embedctl_workers.arrays.outputs import WEIGHT, cells_of, cells_of_weights
from embedctl_workers.arrays.tokens import Found
from embedctl_workers.arrays.vectors import unit
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import keep, kept, locked, private_folder, shipped
from embedctl_workers.models.deciding import BESIDE
from embedctl_workers.models.facts import longest_text
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import PROMPT, TEXTS

log = logging.getLogger(__name__)

#: Changes when the same texts give other vectors or another file.
_FORMAT = 1
#: What a name has at its end, of the array that tells where the cells of texts end in another one.
_ENDS = ", ends"

#: By output, of the gate's texts without a prompt and with one.
References = Mapping[Output, tuple[Found, Found]]


def references_for(files: ModelFiles, host: Host) -> References:
    """The model's own vectors of the gate's texts, from the cache, as shipped for a known model, or computed now, which
    takes some seconds.

    Of each output, there are those with the model's default prompt, and those with the gate's, :data:`.PROMPT`, or for
    a model of late interaction with that of queries. Dense ones are float32, texts × dimensions, not normalised unless
    the model itself does so. Of another output, there is a cell for each text, with tokens' vectors of length 1.

    Raises:
        MissingExtra: they are not in the cache, and sentence-transformers is not installed.
        ModelError: they are not in the cache and can't be computed, or `host.build` forbids it; or another user can
            write to their folder.
    """
    path = references_path(files, host)
    found = _load(path, files.outputs)
    if found is None:
        try:
            private_folder(path.parent)
            with locked(path):
                found = _load(path, files.outputs) or _compute(files, host, path)
        except OSError as error:
            raise ModelError(f"the references of model {files.name!r} can't be kept in {path}: {error}") from error
    return found


def references_path(files: ModelFiles, host: Host) -> Path:
    """The file with the references of a model; it may be copied to another machine."""
    others = files.outputs if files.outputs != PLAIN else ()
    facts = json.dumps([_FORMAT, PROMPT, *TEXTS.values(), *others])
    return host.cache / "references" / f"{files.fingerprint}-{hashlib.sha256(facts.encode()).hexdigest()[:32]}.npz"


def _load(path: Path, outputs: Sequence[Output]) -> References | None:
    """The references of a file; None if there is none, or it is damaged or not trusted."""
    data = kept(path) or shipped(path.name)
    if data is None:
        return None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            found = {output: (_read(file, output, None), _read(file, output, PROMPT)) for output in outputs}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        log.warning("%s is damaged and is made again: %s", path, error)
        return None
    if all(each.dtype in (np.float32, object) and len(each) == len(TEXTS) for pair in found.values() for each in pair):
        return found
    log.warning("%s holds something else and is made again", path)
    return None


def _name(output: Output, prompt: str | None) -> str:
    kind = "plain" if prompt is None else "prompted"
    return kind if output is Output.DENSE else f"{output}, {kind}"


def _read(file: Mapping[str, Any], output: Output, prompt: str | None) -> Found:
    name = _name(output, prompt)
    numbers: Found = file[name]
    return numbers if output is Output.DENSE else cells_of([np.split(numbers, file[name + _ENDS][:-1])])[:, 0]


def _compute(files: ModelFiles, host: Host, path: Path) -> References:
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
        found = _load(fresh, files.outputs)
        if child.returncode or found is None:
            why = (said.strip() or f"status {child.returncode}").splitlines()[-1]
            raise ModelError(f"the references of model {files.name!r} can't be computed from {files.folder}: {why}")
        keep(path, fresh.read_bytes())
    return found


def main() -> None:
    from embedctl_workers.models.opening import open_model

    folder, path, pooling, names = sys.argv[1:]
    outputs = outputs_of(names)
    model: Any = open_model(Path(folder), pooling, outputs).eval()
    longest = longest_text(model)
    if longest < (model.max_seq_length or longest):
        model.max_seq_length = longest  # it states more than it has positions for, and would fail with the longest text
    arrays: dict[str, Any] = {}
    for prompt in (None, PROMPT):
        for output, found in _encoded(model, Path(folder), outputs, prompt).items():
            name = _name(output, prompt)
            if output is not Output.DENSE:
                arrays[name + _ENDS] = np.cumsum([len(cell) for cell in found])
            arrays[name] = found if output is Output.DENSE else np.concatenate(found)
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **arrays)


def _encoded(model: Any, folder: Path, outputs: tuple[Output, ...], prompt: str | None) -> dict[Output, Any]:
    """What a model gives of the texts, one at a time: nothing is padded, so a reference depends on no other text."""
    texts, how = list(TEXTS.values()), {"batch_size": 1, "show_progress_bar": False}
    if outputs == (Output.MULTI,):
        encode = model.encode_document if prompt is None else model.encode_query
        return {Output.MULTI: [unit(text.numpy()) for text in encode(texts, **how)]}
    vectors = model.encode(texts, prompt=prompt, **how)
    if outputs == (Output.SPARSE,):
        return {Output.SPARSE: cells_of_weights(vectors.to_dense().numpy())}
    states = model.encode(texts, prompt=prompt, output_value="token_embeddings", **how) if outputs != PLAIN else ()
    beside = {output: _beside(model, folder, output, prompt, states) for output in outputs[1:]}
    return {Output.DENSE: np.asarray(vectors, np.float32), **beside}


def _beside(model: Any, folder: Path, output: Output, prompt: str | None, states: Sequence[Any]) -> list[Any]:
    """What a head beside the dense vectors makes of the states of each text's tokens, as bge-m3's authors compute it
    (FlagEmbedding, BGEM3FlagModel)."""
    import torch

    head = torch.load(folder / BESIDE[output], map_location="cpu", weights_only=True)  # no code in it is run
    numbers = [(each.float() @ head["weight"].float().T + head["bias"].float()).numpy() for each in states]
    if output is Output.MULTI:
        return [unit(text[1:]) for text in numbers]
    tokenizer, cells = model.tokenizer, []
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for text, weights in zip(TEXTS.values(), numbers, strict=True):
        largest: dict[int, float] = {}
        for token, weight in zip(
            model.preprocess([text], prompt=prompt)["input_ids"][0].tolist(), weights[:, 0], strict=True
        ):
            if weight > largest.get(token, 0) and token not in unused:
                largest[token] = weight
        cells.append(np.array(sorted(largest.items()), WEIGHT))
    return cells


if __name__ == "__main__":
    main()

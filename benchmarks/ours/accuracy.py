"""The probe of accuracy: how far the vectors of classes of CPUs are from torch's in fp32 on real passages."""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from benchmarks.ours.service import Figures

from embedctl_bench.peers.adapters.embedctl_adapters.embedctl import encoded
from embedctl_bench.peers.models import model_files
from embedctl_bench.texts.passages import spread_passages
from embedctl_config.cpu import cpu_flags
from embedctl_config.errors import EmbedctlError, ModelError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.arrays.distance import Measured, measure
from embedctl_workers.arrays.halves import rounded
from embedctl_workers.arrays.tokens import Rows, Vectors
from embedctl_workers.backends.torch.backend import TorchBackend
from embedctl_workers.backends.torch.loading import load_sentence_transformer
from embedctl_workers.backends.torch.packed.choosing import onednn_bf16_layers
from embedctl_workers.backends.torch.packed.kernels import Kernels
from embedctl_workers.backends.torch.packed.layers import LayerKind
from embedctl_workers.backends.torch.packed.tiles import AVX512, Tiles, tile_layers
from embedctl_workers.backends.torch.packed.weights import Weights
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.known_good import load_encoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.compiling import NOT_COMPILED
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.tuning import DEFAULT_TOKEN_BUDGET

Layers = Callable[[Tiles, Kernels], LayerKind]
#: Ways to compute on AVX512_BF16, by their names in the table: the class whose bounds hold, and the layers. The first
#: is what class `cpu` does on AMX. Its speed on AVX512_BF16 means nothing.
_WAYS: Mapping[str, tuple[HardwareClass, Layers]] = {
    "cpu, split products": (SHIPPED_CLASSES["cpu"], lambda tiles, kernels: tile_layers(tiles, 2, kernels)),
    "cpu-bf16, own products": (SHIPPED_CLASSES["cpu-bf16"], lambda tiles, kernels: tile_layers(tiles, 1, kernels)),
    "cpu-bf16, products of oneDNN": (SHIPPED_CLASSES["cpu-bf16"], onednn_bf16_layers),
}
_CLASSES: Mapping[str, HardwareClass] = {
    **{name: entry for name, entry in SHIPPED_CLASSES.items() if entry.device == "cpu"},
    "onnx-int8": HardwareClass(backend="onnx-int8", precision="int8"),
    **{name: entry for name, (entry, _) in _WAYS.items()},
}


def accuracy(*, model: str = "all-MiniLM-L6-v2", count: int = 0, only: str = "") -> Figures:
    """How far the vectors of each class of CPUs are from torch's in fp32, and what that does to similarity.

    The texts are the gate's and `count` of the passages from which the demo takes its own; 0 takes all of them. The
    similarity benchmark is made of the passages: Spearman's correlation between the cosines of pairs and how near the
    two of a pair stand in the source: in one docstring, in one package, or neither. A class that does not run here is
    left out.
    """
    host = Host(len(os.sched_getaffinity(0)), cache_folder(Settings()))
    files = model_files(model, Settings())
    ids, texts = map(list, zip(*spread_passages(count or sys.maxsize), strict=True))
    loaded: Any = load_sentence_transformer(files)
    truth: Vectors = loaded.encode(texts, batch_size=16, normalize_embeddings=True, show_progress_bar=False)
    pairs, nearness = graded_pairs(ids)
    found: Figures = {"passages": len(texts), "pairs": len(pairs)}
    found["torch, fp32: similarity"] = similarity(truth, pairs, nearness)
    for name, hardware in _CLASSES.items():
        try:
            encoder = _encoder(name, files, host) if name == only or not only else None
        except (EmbedctlError, *NOT_COMPILED):
            encoder = None
        if encoder is None:
            continue
        vectors = encoded(encoder, texts, Settings())
        if hardware.stores_float16:
            vectors = rounded(vectors)
        report = measure_backend(encoder, hardware, host)
        assert report  # every class here has references
        found |= _figures(f"{name}, passages", measure(vectors, truth))
        found |= _figures(f"{name}, the gate's texts", report.checks[0].measured)
        found[f"{name}: similarity"] = similarity(vectors, pairs, nearness)
    return found


def _figures(what: str, found: Measured) -> Figures:
    return {f"{what}: {name}": getattr(found, name) for name in ("max_abs_error", "min_cosine", "mean_cosine")}


def _encoder(name: str, files: ModelFiles, host: Host) -> ChunkEncoder:
    if name in _WAYS:
        return ChunkEncoder(_OnAvx512(files, host, _WAYS[name][1]), DEFAULT_TOKEN_BUDGET)
    return load_encoder(Settings(), _CLASSES[name], str(files.folder), host)


def similarity(vectors: Vectors, pairs: Rows, nearness: Rows) -> float:
    """Spearman's correlation between the cosines of pairs and their nearness; `vectors` float32, of unit length."""
    from scipy.stats import spearmanr  # here, because every run of tests that collects this module would pay for it

    first, second = vectors[pairs[:, 0]], vectors[pairs[:, 1]]
    return float(spearmanr(np.einsum("pd,pd->p", first, second, dtype=np.float64), nearness).statistic)


def graded_pairs(ids: Sequence[str]) -> tuple[Rows, Rows]:
    """Each passage with another one of its docstring, of its package, and of the rest, where there is one: pairs × 2,
    the rows of both passages, and one grade per pair: 2, 1 or 0, in this order."""
    docstrings = [label.partition("#")[0] for label in ids]
    packages = [name.partition(".")[0] for name in docstrings]
    by_package: dict[str, list[int]] = defaultdict(list)
    for row, package in enumerate(packages):
        by_package[package].append(row)
    draw = random.Random(0)
    pairs = []
    for row, (docstring, package) in enumerate(zip(docstrings, packages, strict=True)):
        here = [each for each in by_package[package] if each != row]
        same = [each for each in here if docstrings[each] == docstring]
        near = [each for each in here if docstrings[each] != docstring]
        far = draw.randrange(len(ids))
        pairs += [(row, draw.choice(some), grade) for some, grade in ((same, 2), (near, 1)) if some]
        if packages[far] != package:
            pairs.append((row, far, 0))
    found = np.array(pairs, np.int64)
    return found[:, :2], found[:, 2]


class _OnAvx512(TorchBackend):
    """The packed engine with layers of our choice, where a worker takes the fastest; ModelError without AVX512_BF16 or
    for a model that is not of the BERT family."""

    def __init__(self, files: ModelFiles, host: Host, layers: Layers) -> None:
        if not AVX512.needs <= cpu_flags():
            raise ModelError("this CPU has no AVX512_BF16")
        self._kind = layers
        super().__init__(files, host)
        if self.engine == self.PADDED:
            raise ModelError("this model is not packed")

    def _layers(self, weights: Weights, kernels: Kernels, host: Host) -> LayerKind:
        return self._kind(Tiles(AVX512, host), kernels)

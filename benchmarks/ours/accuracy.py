"""How far the vectors of classes of CPUs are from torch's in fp32 on real passages, and what that does to similarity.

    python -m benchmarks.ours.accuracy [--class cpu ...] [--model all-MiniLM-L6-v2] [--passages N]

The passages are those from which the demo takes its own. The similarity benchmark is made of them: Spearman's
correlation between the cosines of pairs and how near the two of a pair stand in the source: in one docstring, in one
package, or neither.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from embedctl_bench.measuring.machine import facts
from embedctl_bench.peers.models import model_files
from embedctl_bench.report import facts_list
from embedctl_bench.texts.passages import passages
from embedctl_config.cpu import cpu_flags
from embedctl_config.errors import EmbedctlError, ModelError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput, RecordKind
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.arrays.distance import Measured, measure
from embedctl_workers.arrays.halves import rounded
from embedctl_workers.arrays.tokens import Rows, Vectors
from embedctl_workers.backends.torch.backend import TorchBackend
from embedctl_workers.backends.torch.loading import load_sentence_transformer
from embedctl_workers.backends.torch.packed.engine import PackedEngine, packed_engine
from embedctl_workers.backends.torch.packed.kernels import Kernels
from embedctl_workers.backends.torch.packed.layers import LayerKind
from embedctl_workers.backends.torch.packed.onednn_layers import onednn_bf16_layers
from embedctl_workers.backends.torch.packed.tiles import AVX512, Tiles, tile_layers
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.loading import load_encoder
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
_CHUNK = 512


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--class", dest="classes", action="append", choices=[*_CLASSES], help="repeatable")
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="or a shape, such as bge-base-shape")
    parser.add_argument("--passages", type=int, help="default: all of them")
    asked = parser.parse_args()
    settings, cpus = Settings(), os.sched_getaffinity(0)
    host = Host(len(cpus), cache_folder(settings))
    try:
        files = model_files(asked.model, settings)
        truth = Truth.of(files, asked.passages)
        print(f"{facts_list(facts(cpus))}\n\n{files.name}, {truth}:\n")
        print("| class | engine | texts | max abs | min cosine | mean cosine | similarity |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        print(f"| – | torch, fp32 | passages | 0 | 1 | 1 | {truth.similarity(truth.vectors):.5f} |")
        for name in dict.fromkeys(asked.classes or _CLASSES):
            print(_rows(name, settings, files, host, truth), flush=True)
    except EmbedctlError as error:
        parser.exit(1, f"{error}\n")


@dataclass(frozen=True, slots=True)
class Truth:
    """Passages, and what is known of them.

    Attributes:
        vectors: of unit length, by the model's own modules in fp32: float32, passages × dimensions.
        pairs, nearness: as :func:`graded_pairs` returns them.
    """

    texts: Sequence[str]
    vectors: Vectors
    pairs: Rows
    nearness: Rows

    def __str__(self) -> str:
        """What tells this corpus from others: the passages depend on Python's version and the packages installed."""
        digest = hashlib.sha256("\n".join(self.texts).encode()).hexdigest()
        return f"{len(self.texts):,} passages (SHA-256 {digest[:16]}…), {len(self.nearness):,} pairs"

    @classmethod
    def of(cls, files: ModelFiles, count: int | None) -> Self:
        ids, texts = spread_passages(count)
        model: Any = load_sentence_transformer(files)
        vectors = model.encode(texts, batch_size=16, normalize_embeddings=True, show_progress_bar=False)
        return cls(texts, vectors, *graded_pairs(ids))

    def similarity(self, vectors: Vectors) -> float:
        """Spearman's correlation between the cosines of pairs and their nearness; `vectors` as the attribute."""
        first, second = vectors[self.pairs[:, 0]], vectors[self.pairs[:, 1]]
        return float(spearmanr(np.einsum("pd,pd->p", first, second, dtype=np.float64), self.nearness).statistic)


def spread_passages(count: int | None) -> tuple[list[str], list[str]]:
    """Ids and texts of so many passages, spread evenly over all of them, as in the demo; None: of all."""
    found = list(passages())
    count = min(count or len(found), len(found))
    chosen = [found[number * len(found) // count] for number in range(count)]
    return [label for label, _ in chosen], [text for _, text in chosen]


def graded_pairs(ids: Sequence[str]) -> tuple[Rows, Rows]:
    """Each passage with another one of its docstring, of its package, and of the rest, where there is one.

    Returns:
        pairs × 2: the rows of both passages; and one per pair: 2, 1 or 0, in the order above.
    """
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


def _rows(name: str, settings: Settings, files: ModelFiles, host: Host, truth: Truth) -> str:
    """A class's rows of the table; or in their place, why it does not run here."""
    hardware = _CLASSES[name]
    try:
        if name in _WAYS:
            encoder = ChunkEncoder(_OnAvx512(files, host, _WAYS[name][1]), DEFAULT_TOKEN_BUDGET)
        else:
            encoder = load_encoder(settings, hardware, str(files.folder), host)
    except (EmbedctlError, *NOT_COMPILED) as error:
        return f"| {name} | {error} | | | | | |"
    vectors = encoded(encoder, truth.texts)
    if hardware.stores_float16:
        vectors = rounded(vectors)
    report = measure_backend(encoder, hardware, host)
    assert report  # every class here has references
    about = f"| {name} | {encoder.backend.engine} |"
    return "\n".join(
        (
            f"{about} passages | {_figures(measure(vectors, truth.vectors))} | {truth.similarity(vectors):.5f} |",
            f"{about} the gate's | {_figures(report.checks[0].measured)} | |",
        )
    )


def _figures(found: Measured) -> str:
    return f"{found.max_abs_error:.1e} | {found.min_cosine:.6f} | {found.mean_cosine:.6f}"


def encoded(encoder: ChunkEncoder, texts: Sequence[str]) -> Vectors:
    """The vectors as a worker computes them, in chunks: float32, texts × dimensions."""
    found = []
    for at in range(0, len(texts), _CHUNK):
        some = [text.encode() for text in texts[at : at + _CHUNK]]
        chunk = ChunkInput(first=at, kinds=bytes([RecordKind.TEXT] * len(some)), texts=some)
        found.append(encoder.encode(encoder.prepare(chunk, {})).vectors)
    return np.concatenate(found)


class _OnAvx512(TorchBackend):
    """The packed engine with layers of our choice, where a worker takes the fastest.

    Raises:
        ModelError: this CPU has no AVX512_BF16, or the model is not of the BERT family.
    """

    def __init__(self, files: ModelFiles, host: Host, layers: Layers) -> None:
        if not AVX512.needs <= cpu_flags():
            raise ModelError("this CPU has no AVX512_BF16")
        self._layers = layers
        super().__init__(files, host)
        if self.engine == self.PADDED:
            raise ModelError("this model is not packed")

    def _packed(self, model: SentenceTransformer, host: Host) -> PackedEngine | None:
        return packed_engine(model, host, lambda _weights, kernels, host: self._layers(Tiles(AVX512, host), kernels))


if __name__ == "__main__":
    main()

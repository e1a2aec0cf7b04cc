"""Chooses how the layers of a model are computed on this CPU: what it can do, what is right, what is fastest here."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version

import numpy as np

from embedctl_config import __version__
from embedctl_config.cpu import cpu_flags, cpu_identity
from embedctl_config.errors import ModelError
from embedctl_workers.backends.torch.packed.buffers import Array, Buffers, Matrix
from embedctl_workers.backends.torch.packed.fused import FloatLibrary, fits_fused, fused_layers
from embedctl_workers.backends.torch.packed.inputs import Texts
from embedctl_workers.backends.torch.packed.kernels import CompiledKernels, Kernels
from embedctl_workers.backends.torch.packed.layers import EncoderLayer, LayerKind, by_heads, joined_qkv
from embedctl_workers.backends.torch.packed.tiles import AMX, AVX512, Tiles, Unit, fit_tiles, tile_layers
from embedctl_workers.backends.torch.packed.weights import Layer, Part, Weights
from embedctl_workers.machine import teams
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import note, noted
from embedctl_workers.models.compiling import NOT_COMPILED
from embedctl_workers.models.fastest import Choice, Run, fastest, timed

log = logging.getLogger(__name__)

#: Tokens of the texts of the batches with which one layer is checked and timed: mixed, as in collections of passages.
#: Each batch fills units of 16 rows, because what pads them counts far less in a batch of usual size.
_BATCHES = ((8, 13, 26, 26, 39), (64, 80, 96))
#: Largest relative error of a token after one layer, with two parts of each factor and with one.
_CLOSE, _ROUGH = 1e-4, 0.03
#: With these instructions, our own products were as fast as torch's or faster wherever both were timed, and importing
#: torch to compare them once more would take most of a first start.
OURS_FASTER = frozenset({"avx2", "fma"})


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for one model; on a host with `build`, what was chosen is kept for models of the same shape."""

    weights: Weights
    kernels: Kernels
    host: Host

    def fp32(self, *, plain: bool = False) -> LayerKind:
        """Layers within the bounds of fp32: AMX's split products, our own, or torch's, which alone are `plain`."""
        own = [] if plain else [*self._split(), *self._fused()]
        if own and cpu_flags() >= OURS_FASTER:
            with suppress(ModelError):  # logged: all are wrong
                return self._fastest(own, _CLOSE)
        return self._fastest([*own, *(plain_layers(name, self.kernels) for name in ("BLAS", "oneDNN"))], _CLOSE)

    def bf16(self, *, plain: bool = False) -> LayerKind:
        """Layers with products in bf16: our own on the best unit of this CPU, or oneDNN's where they are faster here.

        `plain`: torch's products, and attention in float32, in any case. A ModelError if none computes correctly.
        """
        for tiles in [] if plain else self._tiles((AMX, AVX512)):
            kinds = [tile_layers(tiles, 1, self.kernels), onednn_bf16_layers(tiles, self.kernels)]
            try:
                return self._fastest(kinds, _ROUGH)
            except ModelError:  # logged: both are wrong
                break
        return self._fastest([plain_layers("oneDNN bf16", self.kernels)], _ROUGH)

    def _split(self) -> list[LayerKind]:
        return [tile_layers(tiles, 2, self.kernels) for tiles in self._tiles((AMX,))]

    def _fused(self) -> list[LayerKind]:
        if not isinstance(self.kernels, CompiledKernels) or not fits_fused(self.weights):
            return []
        try:
            return [fused_layers(f"{self.kernels.name}, own products", FloatLibrary(self.host, self.kernels))]
        except NOT_COMPILED as error:
            log.warning("no products of our own: %s", error)
            return []

    def _tiles(self, units: Sequence[Unit]) -> list[Tiles]:
        """The first of these units that the CPU, the system and the compiler know, if the model fits tiles; or none."""
        if not isinstance(self.kernels, CompiledKernels) or not fit_tiles(self.weights):
            return []
        flags = cpu_flags()
        for unit in units:
            if unit.needs <= flags:
                try:
                    return [Tiles(unit, self.host)]
                except NOT_COMPILED as error:
                    log.warning("no products on %s, which may be several times as fast: %s", unit.name, error)
        return []

    def _fastest(self, kinds: Sequence[LayerKind], tolerance: float) -> LayerKind:
        """The fastest on one layer of those that agree with NumPy's products in fp32; a ModelError if none does."""
        by_name = {kind.name: kind for kind in kinds}
        facts = [*self._deciding(), _BATCHES, [[kind.name, *kind.code] for kind in kinds]]
        seconds = noted(self.host.cache, "fastest", facts)
        if not (isinstance(seconds, dict) and seconds and seconds.keys() <= by_name.keys()):
            seconds = self._measured(kinds, tolerance)
            if self.host.build:
                note(self.host.cache, "fastest", facts, seconds)
        choice = Choice.among(seconds)
        return replace(by_name[choice.name], chosen=str(choice))

    def _deciding(self) -> list[object]:
        """What else but its candidates a choice depends on: software, CPU, and the model's shape."""
        layer = self.weights.layers[0]
        shape = [*self.weights.words.shape[1:], self.weights.heads, len(layer.up.bias), len(layer.query.bias)]
        return [__version__, version("torch"), cpu_identity(), *shape, self.weights.activation is None]

    def _measured(self, kinds: Sequence[LayerKind], tolerance: float) -> dict[str, float]:
        """Seconds of one layer by the name of its kind, for those that agree with NumPy's products in fp32."""
        with _one_thread():
            probe = _Probe(self.weights, self.kernels, tolerance)
            runs = {kind.name: found for kind in kinds if (found := probe.runs_of(kind))}
            if not runs:
                raise ModelError("no matrix product in bf16 computes correctly here")
            return dict(fastest(runs).seconds)


def plain_layers(product: str, kernels: Kernels) -> LayerKind:
    """Products by torch, which is imported for them, and kernels between them; `product` is a name in `linear.py`."""

    def laid_out(layer: Layer, weights: Weights) -> EncoderLayer:
        from embedctl_workers.backends.torch.packed.linear import PRODUCTS, PlainLayer

        return PlainLayer(layer, weights, PRODUCTS[product], kernels)

    return LayerKind(f"{kernels.name}, {product}", laid_out, kernels.code)


def onednn_bf16_layers(tiles: Tiles, kernels: Kernels) -> LayerKind:
    """Products of oneDNN in bf16, by torch, which is imported for them, and attention on tiles."""

    def laid_out(layer: Layer, weights: Weights) -> EncoderLayer:
        from embedctl_workers.backends.torch.packed.onednn_layers import OneDnnBf16Layer

        return OneDnnBf16Layer(layer, weights, tiles, kernels)

    name = f"{kernels.name}, oneDNN bf16, attention on {tiles.unit.name}"
    return LayerKind(name, laid_out, tiles.code + kernels.code)


def _by_numpy(layer: Layer, weights: Weights, kernels: Kernels) -> EncoderLayer:
    """Products by NumPy, and kernels between them: what all others have to agree with."""

    def by(x: Array, part: Part) -> Array:
        product: Array = x @ part.weight.T + part.bias
        return product

    qkv = Part(*joined_qkv(layer, weights.heads))

    def compute(x: Matrix, texts: Texts, buffers: Buffers) -> None:
        x, context = np.asarray(x), buffers("context", *x.shape)
        kernels.attention(by_heads(by(x, qkv), weights.heads), texts, context)
        kernels.add_layer_norm(x, by(context, layer.out), layer.attention_norm)
        inner: Matrix = by(x, layer.up)
        if weights.activation is None:
            kernels.gelu(inner)
        else:
            inner = weights.activation(import_module("torch").as_tensor(inner))
        kernels.add_layer_norm(x, by(np.asarray(inner), layer.down), layer.norm)

    return compute


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it, torch and our kernels compute in this thread alone, whose CPU time is taken."""
    threads = teams.threads()
    teams.set_threads(1)
    try:
        yield
    finally:
        teams.set_threads(threads)


class _Probe:
    """Batches with values as between layers, and the first layer's outputs for them."""

    def __init__(self, weights: Weights, kernels: Kernels, tolerance: float) -> None:
        self._weights = weights
        self._tolerance = tolerance
        self._buffers = Buffers()
        random, hidden = np.random.default_rng(0), weights.words.shape[1]
        self._batches = [
            (random.standard_normal((sum(lengths), hidden), np.float32), Texts.at(np.cumsum([0, *lengths])))
            for lengths in _BATCHES
        ]
        exact = _by_numpy(weights.layers[0], weights, kernels)
        self._expected = [self._run(exact, *batch) for batch in self._batches]

    def _run(self, layer: EncoderLayer, x: Array, texts: Texts) -> Array:
        x = x.copy()
        layer(x, texts, self._buffers)
        return x

    def runs_of(self, kind: LayerKind) -> list[Run]:
        """Run the first layer, once for each batch; none if it does not run here or its output is wrong."""
        try:
            layer = kind.layer(self._weights.layers[0], self._weights)
            teams.set_threads(1)  # importing torch has changed it
            found = [self._run(layer, *batch) for batch in self._batches]
        except (AttributeError, RuntimeError) as failed:  # torch was built without oneDNN, or changed its operators
            log.warning("%s is not used: %s", kind.name, failed)
            return []
        if all(map(self._close, found, self._expected)):
            return [timed(partial(self._run, layer, *batch)) for batch in self._batches]
        log.warning("%s is not used, because it computes wrongly here: please report this", kind.name)
        return []

    def _close(self, found: Array, expected: Array) -> bool:
        error, size = (np.linalg.norm(each, axis=1) for each in (found - expected, expected))
        return bool((error <= self._tolerance * size).all())

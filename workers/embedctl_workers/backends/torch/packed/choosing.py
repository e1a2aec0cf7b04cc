"""Chooses how the layers of a model are computed on this CPU: what it can do, what is right, what is fastest here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from embedctl_config import __version__
from embedctl_config.cpu import cpu_flags, cpu_identity
from embedctl_config.errors import ModelError
from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.fused import FloatLibrary, fits_fused, fused_layers
from embedctl_workers.backends.torch.packed.kernels import Kernels, Texts, TorchKernels
from embedctl_workers.backends.torch.packed.layers import EncoderLayer, LayerKind, plain_layers
from embedctl_workers.backends.torch.packed.linear import BlasLinear, OneDnnBf16Linear, OneDnnLinear
from embedctl_workers.backends.torch.packed.onednn_layers import onednn_bf16_layers
from embedctl_workers.backends.torch.packed.tiles import AMX, AVX512, Tiles, Unit, fit_tiles, tile_layers
from embedctl_workers.backends.torch.packed.weights import Weights
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import note, noted
from embedctl_workers.models.compiling import NOT_COMPILED
from embedctl_workers.models.fastest import Choice, fastest

log = logging.getLogger(__name__)

#: Tokens of the texts with which one layer is checked and timed: mixed, as in collections of passages.
_LENGTHS = (8, 13, 26, 26, 40, 64, 79, 96, 160)
#: Largest relative error of a token after one layer, with two parts of each factor and with one.
_CLOSE, _ROUGH = 1e-4, 0.03


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for one model; on a host with `build`, what was chosen is kept for models of the same shape."""

    weights: Weights
    kernels: Kernels
    host: Host

    def fp32(self, *, plain: bool = False) -> LayerKind:
        """Layers within the bounds of fp32: AMX's split products, our own, or torch's, which alone are `plain`."""
        blas, onednn = (plain_layers(linear, self.kernels) for linear in (BlasLinear, OneDnnLinear))
        own = [] if plain else [*self._split(), *self._fused()]
        return self._fastest([*own, blas, onednn], _CLOSE)

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
        return self._fastest([plain_layers(OneDnnBf16Linear, self.kernels)], _ROUGH)

    def _split(self) -> list[LayerKind]:
        return [tile_layers(tiles, 2, self.kernels) for tiles in self._tiles((AMX,))]

    def _fused(self) -> list[LayerKind]:
        if isinstance(self.kernels, TorchKernels) or not fits_fused(self.weights):
            return []
        try:
            return [fused_layers(f"{self.kernels.name}, own products", FloatLibrary(self.host, self.kernels))]
        except NOT_COMPILED as error:
            log.warning("no products of our own: %s", error)
            return []

    def _tiles(self, units: Sequence[Unit]) -> list[Tiles]:
        """The first of these units that the CPU, the system and the compiler know, if the model fits tiles; or none."""
        if isinstance(self.kernels, TorchKernels) or not fit_tiles(self.weights):
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
        """The fastest on one layer of those that agree with torch's products in fp32; a ModelError if none does."""
        by_name = {kind.name: kind for kind in kinds}
        facts = [*self._deciding(), list(by_name)]
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
        shape = [*self.weights.words.shape[1:], self.weights.heads, layer.up.out_features, layer.query.out_features]
        return [__version__, torch.__version__, cpu_identity(), *shape, self.weights.activation is None]

    def _measured(self, kinds: Sequence[LayerKind], tolerance: float) -> dict[str, float]:
        """Seconds of one layer by the name of its kind, for those that agree with torch's products in fp32."""
        with torch.inference_mode(), _one_thread():
            probe = _Probe(self.weights, self.kernels, tolerance)
            runs = {kind.name: run for kind in kinds if (run := probe.run_of(kind)) is not None}
            if not runs:
                raise ModelError("no matrix product in bf16 computes correctly here")
            return dict(fastest(runs).seconds)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it, torch and our kernels compute in this thread alone, whose CPU time is taken."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Probe:
    """A batch with values as between layers, and the first layer's output for it."""

    def __init__(self, weights: Weights, kernels: Kernels, tolerance: float) -> None:
        self._weights = weights
        self._tolerance = tolerance
        self._texts = Texts.at(np.cumsum([0, *_LENGTHS]))
        self._buffers = Buffers()
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(sum(_LENGTHS), weights.words.shape[1], generator=generator)
        self._expected = self._run(plain_layers(BlasLinear, kernels).layer(weights.layers[0], weights))

    def _run(self, layer: EncoderLayer) -> torch.Tensor:
        x = self._x.clone()
        layer(x, self._texts, self._buffers)
        return x

    def run_of(self, kind: LayerKind) -> Callable[[], torch.Tensor] | None:
        """Runs the first layer; None if it does not run here or its output is wrong."""
        try:
            layer = kind.layer(self._weights.layers[0], self._weights)
            error = torch.linalg.vector_norm(self._run(layer) - self._expected, dim=1)
        except (AttributeError, RuntimeError) as failed:  # torch was built without oneDNN, or changed its operators
            log.warning("%s is not used: %s", kind.name, failed)
            return None
        if bool((error <= self._tolerance * torch.linalg.vector_norm(self._expected, dim=1)).all()):
            return partial(self._run, layer)
        log.warning("%s is not used, because it computes wrongly here: please report this", kind.name)
        return None

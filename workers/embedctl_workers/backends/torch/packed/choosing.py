"""Chooses how the layers of a model are computed on this CPU: what it can do, what is right, what is fastest here."""

from __future__ import annotations

import logging
import timeit
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from embedctl_config.cpu import cpu_flags
from embedctl_config.errors import ModelError
from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.kernels import Kernels, Texts, TorchKernels
from embedctl_workers.backends.torch.packed.layers import EncoderLayer, LayerKind, plain_layers
from embedctl_workers.backends.torch.packed.linear import OneDnnBf16Linear, fastest_linear
from embedctl_workers.backends.torch.packed.onednn_layers import onednn_bf16_layers
from embedctl_workers.backends.torch.packed.tiles import AMX, AVX512, Tiles, Unit, fit_tiles, tile_layers
from embedctl_workers.backends.torch.packed.weights import Weights
from embedctl_workers.machine.host import Host
from embedctl_workers.models.compiling import NOT_COMPILED

log = logging.getLogger(__name__)

#: Tokens of the texts with which one layer is checked and timed: mixed, as in collections of passages.
_LENGTHS = (8, 13, 26, 26, 40, 64, 79)
_ROUNDS = 3
#: Largest relative error of a token after one layer, with two parts of each factor and with one.
_CLOSE, _ROUGH = 1e-4, 0.03


def fp32_layers(weights: Weights, kernels: Kernels, host: Host, *, plain: bool = False) -> LayerKind:
    """Layers within the bounds of fp32: AMX's split products where they beat torch's here, and never if `plain`."""
    usual = plain_layers(fastest_linear(weights.layers[0].up.weight.detach().float()), kernels)
    if plain:
        return usual
    split = [tile_layers(tiles, 2, kernels) for tiles in _tiles(weights, kernels, host, (AMX,))]
    return _fastest([usual, *split], weights, usual, _CLOSE)


def bf16_layers(weights: Weights, kernels: Kernels, host: Host, *, plain: bool = False) -> LayerKind:
    """Layers with products in bf16: our own on the best unit of this CPU, or oneDNN's where they are faster here.

    `plain`: torch's products, and attention in float32, in any case. A ModelError if none of them computes correctly.
    """
    exact = plain_layers(fastest_linear(weights.layers[0].up.weight.detach().float()), kernels)
    for tiles in [] if plain else _tiles(weights, kernels, host, (AMX, AVX512)):
        with suppress(ModelError):  # logged: both are wrong
            return _fastest(
                [tile_layers(tiles, 1, kernels), onednn_bf16_layers(tiles, kernels)], weights, exact, _ROUGH
            )
    return _fastest([plain_layers(OneDnnBf16Linear, kernels)], weights, exact, _ROUGH)


def _tiles(weights: Weights, kernels: Kernels, host: Host, units: Sequence[Unit]) -> list[Tiles]:
    """The first of these units that the CPU, the system and the compiler know, if the model fits tiles; or none."""
    if isinstance(kernels, TorchKernels) or not fit_tiles(weights):
        return []
    flags = cpu_flags()
    for unit in units:
        if unit.needs <= flags:
            try:
                return [Tiles(unit, host)]
            except NOT_COMPILED as error:
                log.warning("no products on %s, which may be several times as fast: %s", unit.name, error)
    return []


def _fastest(kinds: Sequence[LayerKind], weights: Weights, exact: LayerKind, tolerance: float) -> LayerKind:
    """The fastest on one layer of those that agree with `exact`, ModelError if none does; `exact` alone is not run."""
    if list(kinds) == [exact]:
        return exact
    with torch.inference_mode():
        probe = _Probe(weights, exact, tolerance)
        layers = {kind: layer for kind in kinds if (layer := probe.layer(kind)) is not None}
        if not layers:
            raise ModelError("no matrix product in bf16 computes correctly here")
        seconds = dict.fromkeys(layers, float("inf"))
        for _ in range(_ROUNDS):
            for kind, layer in layers.items():
                seconds[kind] = min(seconds[kind], probe.seconds(layer))
    log.debug("one layer: %s", ", ".join(f"{kind.name} {1e3 * taken:.2f} ms" for kind, taken in seconds.items()))
    return min(seconds, key=seconds.__getitem__)


class _Probe:
    """A batch with values as between layers, and the first layer's output for it."""

    def __init__(self, weights: Weights, exact: LayerKind, tolerance: float) -> None:
        self._weights = weights
        self._tolerance = tolerance
        self._texts = Texts.at(np.cumsum([0, *_LENGTHS]))
        self._buffers = Buffers()
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(sum(_LENGTHS), weights.words.shape[1], generator=generator)
        self._expected = self._run(exact.layer(weights.layers[0], weights))

    def _run(self, layer: EncoderLayer) -> torch.Tensor:
        x = self._x.clone()
        layer(x, self._texts, self._buffers)
        return x

    def layer(self, kind: LayerKind) -> EncoderLayer | None:
        """The first layer; None if it does not run here or its output is wrong."""
        try:
            layer = kind.layer(self._weights.layers[0], self._weights)
            error = torch.linalg.vector_norm(self._run(layer) - self._expected, dim=1)
        except (AttributeError, RuntimeError) as failed:  # torch was built without oneDNN, or changed its operators
            log.warning("%s is not used: %s", kind.name, failed)
            return None
        if bool((error <= self._tolerance * torch.linalg.vector_norm(self._expected, dim=1)).all()):
            return layer
        log.warning("%s is not used, because it computes wrongly here: please report this", kind.name)
        return None

    def seconds(self, layer: EncoderLayer) -> float:
        return timeit.timeit(lambda: self._run(layer), number=1)

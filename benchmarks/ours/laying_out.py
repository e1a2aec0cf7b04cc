"""The CPU time in which a worker of a class of CPUs lays out a model's weights, on one thread, as it loads the model.

python -m benchmarks.ours.laying_out [--model all-MiniLM-L6-v2 ...]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from statistics import median

import torch

from embedctl_bench.measuring.machine import facts
from embedctl_bench.measuring.shapes import source_of
from embedctl_config.cpu import cpu_flags
from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.backends.torch.loading import load_sentence_transformer
from embedctl_workers.backends.torch.packed.inputs import packable
from embedctl_workers.backends.torch.packed.int8 import Int8Library, int8_layers
from embedctl_workers.backends.torch.packed.kernels import load_kernels
from embedctl_workers.backends.torch.packed.layers import LayerKind, plain_layers
from embedctl_workers.backends.torch.packed.linear import BlasLinear, OneDnnBf16Linear, OneDnnLinear
from embedctl_workers.backends.torch.packed.onednn_layers import onednn_bf16_layers
from embedctl_workers.backends.torch.packed.tiles import AMX, AVX512, EMULATED, Tiles, tile_layers
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.files import resolve_model

_ROUNDS = 5


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", dest="models", action="append", help="or a shape; repeatable")
    models = parser.parse_args().models or ["all-MiniLM-L6-v2", "bge-base-shape"]
    settings, cpus = Settings(), os.sched_getaffinity(0)
    host = Host(1, cache_folder(settings))
    torch.set_num_threads(1)
    print("".join(f"- {name}: {fact}\n" for name, fact in facts(cpus).items()))
    print("| model | laid out for | CPU s on one thread, median (least to most) |\n| --- | --- | --- |")
    for model in models:
        found = packable(load_sentence_transformer(resolve_model(model, ModelEntry(source_of(model, settings)))))
        assert found, f"{model} is not of the BERT family"
        weights, _ = found
        for kind in _kinds(host):
            seconds = []
            for _ in range(_ROUNDS):
                began = time.process_time()
                layers = [kind.layer(layer, weights) for layer in weights.layers]
                seconds.append(time.process_time() - began)
                del layers
            print(f"| {model} | {kind.name} | {median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) |")


def _kinds(host: Host) -> Iterator[LayerKind]:
    """Every way to compute layers here; where the CPU lacks a unit, the emulated one, whose layout is the same."""
    kernels, flags = load_kernels(host), cpu_flags()
    for linear in (BlasLinear, OneDnnLinear, OneDnnBf16Linear):
        yield plain_layers(linear, kernels)
    tiles = Tiles(next((unit for unit in (AMX, AVX512) if unit.needs <= flags), EMULATED), host)
    yield tile_layers(tiles, 1, kernels)
    yield tile_layers(tiles, 2, kernels)
    yield onednn_bf16_layers(tiles, kernels)
    if flags & {"avx512_vnni", "avx_vnni"}:
        yield int8_layers(Int8Library(host))


if __name__ == "__main__":
    main()

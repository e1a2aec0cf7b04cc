"""Where the time of a worker's engine goes, on one thread: its parts as shares of the whole.

    python -m benchmarks.ours.engine_profile [--class cpu ...] [--model all-MiniLM-L6-v2 ...] [--workload W1 ...]

Calls into the compiled libraries and torch's products are timed; what is left is Python, pooling and torch's views.
A part that a library computes in one pass with its products, such as GELU, has no time of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from embedctl_bench.engines import count_of
from embedctl_bench.measuring.machine import facts
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl import EngineAdapter
from embedctl_bench.peers.models import Model, measured_model, peers_folder
from embedctl_bench.report import facts_list, grid
from embedctl_bench.texts.workloads import make_workload
from embedctl_config.settings import Settings
from embedctl_workers.backends.torch.packed import int8, kernels, linear, native, tiles
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.models.cache import cache_folder, private_folder

_ROUNDS = 5
_PRODUCTS, _FUSED = "products with their biases", "products with what follows them (GELU, residual, LayerNorm)"
#: Function of a library → the part that it computes.
_PARTS: Mapping[str, str] = {
    "embed": "embeddings",
    "attention": "attention",
    "int8_attention": "attention",
    "add_layer_norm": "residual and LayerNorm",
    "gelu": "GELU",
    "project": _PRODUCTS,
    "int8_linear": _PRODUCTS,
    "finish": _FUSED,
    "int8_rest": _FUSED,
}
_TOKENISING, _REST = "tokenising", "everything else"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--class", dest="classes", action="append", help="repeatable")
    parser.add_argument("--model", dest="models", action="append", help="or a shape; repeatable")
    parser.add_argument("--workload", dest="workloads", action="append", choices=["W1", "W2"], help="repeatable")
    asked = parser.parse_args()
    settings = Settings()
    torch.set_num_threads(1)
    place = private_folder(peers_folder(settings))
    print(f"{facts_list(facts(os.sched_getaffinity(0)))}\n")
    table: dict[str, dict[str, str]] = defaultdict(dict)
    for model_name in asked.models or ["all-MiniLM-L6-v2"]:
        model = measured_model(model_name, settings, place)
        for workload in asked.workloads or ["W1", "W2"]:
            for hardware in asked.classes or ["cpu", "cpu-bf16", "cpu-int8"]:
                column = f"{model_name}, {workload}, `{hardware}`"
                for part, share in _shares(model, workload, hardware, settings).items():
                    table[part][column] = share
                print(f"measured {column}", flush=True)
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    rows = [[part, *(row.get(column, "–") for column in columns)] for part, row in table.items()]
    print(f"\n{grid(['part', *columns], rows)}")


def _shares(model: Model, workload_name: str, hardware: str, settings: Settings) -> dict[str, str]:
    """Each part's share of the time, largest first; the engine and its tokens/s."""
    workload = make_workload(workload_name, count_of(workload_name, model), model, peers_folder(settings))
    texts = json.loads(workload.path.read_text(encoding="utf-8"))
    spent: defaultdict[str, float] = defaultdict(float)
    with _timed(spent):
        entry = asdict(settings.hardware_class(hardware))
        engine = EngineAdapter(model.folder, 1, workload.chunk, str(cache_folder(settings)), hardware, entry)
        engine.encode(texts[: len(texts) // 4])
        rounds = [_round(engine, texts, spent) for _ in range(_ROUNDS)]
    whole = median(sum(each.values()) for each in rounds)
    parts = {part: median(each[part] / sum(each.values()) for each in rounds) for part in rounds[0]}
    shares = {part: f"{share:.1%}" for part, share in sorted(parts.items(), key=lambda each: -each[1])}
    return {**shares, "engine": engine.computes, "tokens/s": f"{workload.tokens / whole:,.0f}"}


def _round(engine: EngineAdapter, texts: list[str], spent: defaultdict[str, float]) -> dict[str, float]:
    """Seconds of each part of one pass over the texts."""
    spent.clear()
    began = time.perf_counter()
    engine.encode(texts)
    spent[_REST] = time.perf_counter() - began - sum(spent.values())
    return dict(spent)


@contextmanager
def _timed(spent: defaultdict[str, float]) -> Iterator[None]:
    """Inside it, engines that are loaded add the seconds of their parts to `spent`."""

    def timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                spent[part] += time.perf_counter() - began

        return run

    def library(*args: Any, **options: Any) -> ctypes.CDLL:
        found = native.library(*args, **options)
        for name, part in _PARTS.items():
            if hasattr(found, name):
                setattr(found, name, timed(getattr(found, name), part))
        return found

    with ExitStack() as stack:
        for module in (kernels, tiles, int8):
            stack.enter_context(patch.object(module, "library", library))
        for product in (linear.BlasLinear, linear.OneDnnLinear, linear.OneDnnBf16Linear):
            stack.enter_context(patch.object(product, "__call__", timed(product.__call__, _PRODUCTS)))
        stack.enter_context(patch.object(ChunkEncoder, "prepare", timed(ChunkEncoder.prepare, _TOKENISING)))
        yield


if __name__ == "__main__":
    main()

"""The probe of an engine: where its time goes, on one thread."""

from __future__ import annotations

import ctypes
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.ours.service import Figures

from embedctl_bench.engines import count_of
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl import EngineAdapter
from embedctl_bench.peers.models import measured_model, peers_folder
from embedctl_bench.texts.workloads import make_workload
from embedctl_config.settings import Settings
from embedctl_workers.backends.torch.packed import fused, kernels, linear, native, tiles
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.models.cache import cache_folder, private_folder

_PRODUCTS, _FUSED = "products with their biases", "products with what follows them (GELU, residual, LayerNorm)"
#: Function of a library → the part that it computes.
_PARTS: Mapping[str, str] = {
    "embed": "embeddings",
    "attention": "attention",
    "int8_attention": "attention",
    "add_layer_norm": "residual and LayerNorm",
    "gelu": "GELU",
    "project": _PRODUCTS,
    "fused_linear": _PRODUCTS,
    "finish": _FUSED,
    "fused_rest": _FUSED,
}


def engine_profile(
    *, model: str = "all-MiniLM-L6-v2", hardware: str = "cpu", workload: str = "W1", quick: bool = False
) -> Figures:
    """Where the CPU time of a worker's engine goes, on one thread: its parts as shares of the whole.

    Calls into the compiled libraries and torch's products are timed; what is left is Python, pooling and torch's views.
    A part that a library computes in one pass with its products, such as GELU, has no time of its own.
    """
    settings = Settings()
    torch.set_num_threads(1)
    place = private_folder(peers_folder(settings))
    measured = measured_model(model, settings, place)
    load = make_workload(workload, count_of(workload, measured, quick=quick), measured, place)
    texts = json.loads(load.path.read_text(encoding="utf-8"))
    spent: defaultdict[str, float] = defaultdict(float)
    with _timed(spent):
        entry = asdict(settings.hardware_class(hardware))
        engine = EngineAdapter(measured.folder, 1, load.chunk, str(cache_folder(settings)), hardware, entry)
        engine.encode(texts[: len(texts) // 4])
        spent.clear()
        began = time.thread_time()
        engine.encode(texts)
        whole = time.thread_time() - began
    spent["everything else"] = whole - sum(spent.values())
    shares = {f"share of {part}": part_s / whole for part, part_s in sorted(spent.items(), key=lambda each: -each[1])}
    return {**shares, "tokens/s": load.tokens / whole}


@contextmanager
def _timed(spent: defaultdict[str, float]) -> Iterator[None]:
    """Inside it, engines that are loaded add the seconds of their parts to `spent`."""

    def timed(call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                spent[part] += time.thread_time() - began

        return run

    def library(*args: Any, **options: Any) -> ctypes.CDLL:
        found = native.library(*args, **options)
        for name, part in _PARTS.items():
            if hasattr(found, name):
                setattr(found, name, timed(getattr(found, name), part))
        return found

    with ExitStack() as stack:
        for module in (kernels, tiles, fused):
            stack.enter_context(patch.object(module, "library", library))
        for product in (linear.BlasLinear, linear.OneDnnLinear, linear.OneDnnBf16Linear):
            stack.enter_context(patch.object(product, "__call__", timed(product.__call__, _PRODUCTS)))
        stack.enter_context(patch.object(ChunkEncoder, "prepare", timed(ChunkEncoder.prepare, "tokenising")))
        yield

"""What the systems of our own environment say that they compute in, with the real packages."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl_bench.peers.adapters import embedctl_adapters as adapters
from embedctl_bench.peers.adapters.embedctl_adapters import sentence_transformers as adapter
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Vectors
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.registry import (
    FLOORS,
    SENTENCE_TRANSFORMERS,
    SENTENCE_TRANSFORMERS_BF16,
    TRANSFORMERS,
    System,
    engine_of,
)
from embedctl_config.cpu import no_bf16
from embedctl_config.loading import load_settings
from embedctl_workers.arrays.distance import measure
from tests.support.forked import status_of_fork
from tests.support.references_here import stand_in
from tests.support.tiny_models import MakeModel, Tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEXTS = ["A short text.", "A text of some more words, which takes longer.", "three", *["one and the same text"] * 13]
#: What the peers see of the CPU: no level narrows it.
HAS_BF16 = bool(adapter._BF16 & adapter._cpu_flags())


@dataclass(frozen=True)
class Encoded:
    """What a system computes in, its vectors of the texts, and their tokens."""

    computes: str
    vectors: Vectors
    tokens: int


Encode = Callable[[System], Encoded]


@pytest.fixture(scope="module")
def encode(tmp_path_factory: pytest.TempPathFactory, tiny_model: MakeModel) -> Encode:
    """Load a system at its first setting and encode, in a fork, which does without the imports of a new Python.

    Raises `Unavailable` if the system does not load.
    """
    folder = tiny_model(Tiny(hidden=64, positions=512, max_seq_length=64))
    path = tmp_path_factory.mktemp("encoded") / "encoded.npz"

    @functools.cache
    def encoded(name: str, adapter: str, load: str, options: str) -> Encoded:
        path.unlink(missing_ok=True)
        assert status_of_fork(_encode, adapter, folder, json.loads(load), json.loads(options), path, model=True) == 0
        found = np.load(path)
        if "error" in found:
            raise Unavailable(str(found["error"]))
        return Encoded(str(found["computes"]), found["vectors"], int(found["tokens"]))

    def of(system: System) -> Encoded:
        setting = system.settings[0]
        load = {**setting.load, **({"chunk": 16} if system.ours else {}), **system.fixed}
        return encoded(system.name, system.adapter, json.dumps(load), json.dumps(dict(setting.encode)))

    return of


def _encode(name: str, folder: Path, load: dict[str, Any], options: dict[str, Any], path: Path) -> None:
    module, _, kind = name.partition(":")
    stand_in()
    try:
        loaded = getattr(import_module(f"{adapters.__name__}.{module}"), kind)(folder, 1, **load)
    except RuntimeError as error:
        np.savez(path, error=str(error))
        return
    np.savez(path, computes=loaded.computes, vectors=loaded.encode(TEXTS, **options), tokens=loaded.count(TEXTS))


@pytest.mark.parametrize(
    ("system", "computes"),
    [(SENTENCE_TRANSFORMERS_BF16, "bf16"), (TRANSFORMERS, "fp32")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_system_says_what_it_really_computes_in(encode: Encode, system: System, computes: str) -> None:
    if computes == "bf16" and not HAS_BF16:
        with pytest.raises(Unavailable, match="no instructions for bf16"):
            encode(system)
        return
    done, reference = encode(system), encode(SENTENCE_TRANSFORMERS)
    assert (done.computes, reference.computes) == (computes, "fp32")
    figures = measure(done.vectors, reference.vectors)
    assert (figures.max_abs_error <= (1e-6 if computes == "bf16" else 1e-4)) == (computes == "fp32")
    assert figures.min_cosine >= 0.999


def test_our_engine_encodes_as_a_worker_does(encode: Encode, tmp_path: Path) -> None:
    done = encode(engine_of("cpu", load_settings(cache_dir=str(tmp_path))))
    assert done.computes, "which products and kernels it chose"
    assert measure(done.vectors, encode(SENTENCE_TRANSFORMERS).vectors).max_abs_error <= 1e-4


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_the_floor_of_each_precision_multiplies_every_token(encode: Encode, precision: str) -> None:
    floor = FLOORS[precision]
    if precision == "fp16" and no_bf16():
        with pytest.raises(Unavailable, match="no instructions for bf16"):
            encode(floor)
        return
    done = encode(floor)
    assert done.computes == {"fp32": "fp32", "fp16": "bf16", "int8": "int8"}[precision]
    assert done.tokens > len(TEXTS)
    assert done.vectors.shape == (len(TEXTS), 0)

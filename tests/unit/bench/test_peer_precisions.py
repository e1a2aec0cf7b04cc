"""What other systems say that they compute in, with the real packages, in the environments that are installed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl_bench.peers.adapters import embedctl_adapters as adapters
from embedctl_bench.peers.adapters.embedctl_adapters import sentence_transformers as adapter
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Vectors
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.environments import is_installed
from embedctl_bench.peers.models import Model, peers_folder
from embedctl_bench.peers.registry import (
    FLOORS,
    PEERS,
    SENTENCE_TRANSFORMERS,
    SENTENCE_TRANSFORMERS_BF16,
    TRANSFORMERS,
    System,
    engine_of,
)
from embedctl_bench.peers.tuned import Task, TunedProcess
from embedctl_bench.peers.workload import Workload
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this module's own with the environments that are installed for `embedctl bench`."""
    installed = peers_folder(load_settings())
    folder = tmp_path_factory.mktemp("peers")
    for environment in {system.environment for system in PEERS.values()}:
        if is_installed(environment, installed):
            (folder / environment).symlink_to(installed / environment)
    return folder


@dataclass(frozen=True)
class Encoded:
    """What a system computes in, its vectors of the texts, and their tokens."""

    computes: str
    vectors: Vectors
    tokens: int


Encode = Callable[[System], Encoded]


@pytest.fixture(scope="module")
def encode(place: Path, tiny_model: MakeModel) -> Encode:
    """Load a system at its first setting and encode: in its own environment, or in a fork that has ours."""
    folder = tiny_model(Tiny(hidden=64, positions=512, max_seq_length=64))
    model = Model.in_folder("tiny", folder)
    done: dict[str, Encoded] = {}

    def encoded(system: System) -> Encoded:
        if system.name not in done:
            done[system.name] = in_a_process(system) if system.environment else in_a_fork(system, folder, place)
        return done[system.name]

    def in_a_process(system: System) -> Encoded:
        if not is_installed(system.environment, place):
            pytest.skip(f"{system.environment} is not installed: embedctl bench engines --peers {system.name}")
        path = place / "texts.json"
        path.write_text(json.dumps(TEXTS))
        one = replace(system, settings=system.settings[:1])
        workload = Workload("w", path, model.lengths(TEXTS), chunk=16)
        process = TunedProcess(one, Task(model, workload, [0], place))
        try:
            answer = process.encode()
            return Encoded(process.computes, answer.vectors, answer.tokens)
        finally:
            process.close()

    return encoded


def in_a_fork(system: System, folder: Path, place: Path) -> Encoded:
    """What its process would do, without the imports of a new Python.

    Raises:
        Unavailable: the system does not load.
    """
    path = place / "encoded.npz"
    path.unlink(missing_ok=True)
    setting = system.settings[0]
    load = {**setting.load, **({"chunk": 16} if system.ours else {}), **system.fixed}
    assert status_of_fork(_encode, system.adapter, folder, load, dict(setting.encode), path, model=True) == 0
    found = np.load(path)
    if "error" in found:
        raise Unavailable(str(found["error"]))
    return Encoded(str(found["computes"]), found["vectors"], int(found["tokens"]))


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
    [
        (PEERS["st-openvino"], "fp32 ("),
        (PEERS["st-openvino-default"], "bf16 (" if HAS_BF16 else "fp32 ("),
        (PEERS["ctranslate2"], "fp32"),
        (PEERS["ctranslate2-bf16"], "bf16"),
        (PEERS["ctranslate2-int8"], "int8 (the rest in fp32)"),
        (SENTENCE_TRANSFORMERS_BF16, "bf16"),
        (TRANSFORMERS, "fp32"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_system_says_what_it_really_computes_in(encode: Encode, system: System, computes: str) -> None:
    try:
        done, reference = encode(system), encode(SENTENCE_TRANSFORMERS)
    except Unavailable as error:
        # CTranslate2 has its own mind about CPUs: on some with AMX, it multiplies no bf16.
        may_lack_it = computes == "bf16" and (not HAS_BF16 or system.name == "ctranslate2-bf16")
        if not (
            may_lack_it and re.search("no instructions for bf16|no bfloat16 on this CPU, only float32, ", str(error))
        ):
            raise
        return
    assert done.computes.startswith(computes)
    assert reference.computes == "fp32"
    if "openvino" in system.name:
        used, _, layers = done.computes.partition("(")[2].removesuffix(" linear layers)").partition(" of ")
        assert int(used) == int(layers) > 0
    figures = measure(done.vectors, reference.vectors)
    assert (figures.max_abs_error <= (1e-6 if computes == "bf16" else 1e-4)) == computes.startswith("fp32")
    assert figures.min_cosine >= (0.95 if computes.startswith("int8") else 0.999)


def test_our_engine_encodes_as_a_worker_does(encode: Encode, place: Path) -> None:
    done = encode(engine_of("cpu", load_settings(cache_dir=str(place / "cache"))))
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

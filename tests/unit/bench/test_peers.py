"""Other systems' adapters: what runs in their environments, how requests are dealt, and what models they get."""

from __future__ import annotations

import ast
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from embedctl_bench.peers.adapters.embedctl_adapters.embedctl_pipeline import toml
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Answer, Pool, Server, Setting
from embedctl_bench.peers.environments import ADAPTERS, PACKAGE
from embedctl_bench.peers.models import uncut
from embedctl_bench.peers.registry import INFINITY_SERVER, PEERS
from embedctl_config.hardware import HardwareClass
from embedctl_config.loading import load_settings

pytestmark = pytest.mark.slow

#: What runs where embedctl is not installed.
GUESTS = {
    "__main__",
    "serving",
    "convert",
    "http_client",
    "tokens",
    *(system.adapter.partition(":")[0] for system in (*PEERS.values(), INFINITY_SERVER)),
}


class OneByOne:
    """An engine without a queue: a text's vector is its length, after a moment."""

    def __init__(self, model: Path, threads: int, moment: float = 0.02) -> None:
        self._moment = moment
        self._identity = os.getpid()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        if "bad" in texts:
            raise ValueError("a bad text")
        if "deadly" in texts:
            os._exit(3)
        time.sleep(self._moment)
        return np.array([[len(text), self._identity] for text in texts], np.float64)

    def count(self, texts: Sequence[str]) -> int:
        return sum(map(len, texts))


class Queueing(OneByOne):
    """An engine that takes all requests at once."""

    def requests(self, requests: Sequence[Sequence[str]], callers: int) -> list[Answer]:
        return [Answer(self.encode(texts), 0.0, 1.0, tokens=7) for texts in requests]


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    adapter, processes = request.param
    pool = Pool(f"{__name__}:{adapter}", "model", [min(os.sched_getaffinity(0))] * processes, Setting(processes))
    yield pool
    pool.close()


REQUESTS = [["a"], ["bb", "b"], ["ccc"], ["dddd"], ["eeeee"]]


@pytest.mark.parametrize("pool", [("OneByOne", 2), ("Queueing", 2)], indirect=True)
def test_requests_are_answered_in_order_by_all_processes(pool: Pool) -> None:
    done = pool.requests(REQUESTS)
    assert [each.vectors[:, 0].tolist() for each in done] == [[1], [2, 1], [3], [4], [5]]
    assert len({each.vectors[0, 1] for each in done}) == 2
    before = time.monotonic()
    all_texts = pool.encode(["a", "bb", "ccc"] * 3, 2)
    assert all_texts.vectors[:, 0].tolist() == [1, 2, 3] * 3
    assert before <= all_texts.began < all_texts.began + 0.02 <= all_texts.ended <= time.monotonic()


@pytest.mark.parametrize("pool", [("OneByOne", 1)], indirect=True)
def test_an_engine_without_a_queue_gets_requests_one_after_the_other_and_goes_on_after_an_error(pool: Pool) -> None:
    latencies = [each.ended - each.began for each in pool.requests(REQUESTS)]
    assert latencies == sorted(latencies)
    assert latencies[-1] >= 5 * 0.02
    assert pool.count(["a", "bbb"]) == 4
    with pytest.raises(RuntimeError, match="ValueError: a bad text"):
        pool.requests([["bad"]])
    assert len(pool.requests([["good"]])) == 1
    with pytest.raises(RuntimeError, match="the system's process died"):
        pool.requests([["deadly"]])


def test_texts_that_are_encoded_several_times_count_as_often(tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text('["a", "bb", "ccc"]')
    cpus, settings = [min(os.sched_getaffinity(0))], [{}, {"encode": {"more": 1}}]
    server = Server()
    try:
        texts, adapter = str(tmp_path / "texts.json"), f"{__name__}:OneByOne"
        loaded = server.load(adapter, "model", cpus, settings, texts, sample=3, at_once=0, chunk=2, packages=[])
        assert (loaded["chosen"], "error" in loaded["tried"][1]) == (0, True), "the fastest that works"
        done = server.encode(str(tmp_path / "vectors.npy"), repeat=3)
        (tmp_path / "requests.json").write_text('[["a"], ["bb", "b"]]')
        requests = str(tmp_path / "requests.json")
        at_once, in_turn = (server.requests(requests, str(tmp_path / "v.npy"), callers) for callers in (0, 1))
    finally:
        server.close()
    assert done["tokens"] == 3 * 6
    assert np.load(tmp_path / "vectors.npy")[:, 0].tolist() == [1, 2, 3], "those of the first time"
    first, second = at_once["latencies"]
    assert second >= first + 0.02, "since both were made"
    assert 2 * 0.02 <= sum(in_turn["latencies"]) <= in_turn["seconds"]


def imports_of(path: Path) -> Iterator[str]:
    """Top-level names of absolute imports, and `.name` of relative ones."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f".{node.module}" if node.level else str(node.module).partition(".")[0]


def test_what_runs_in_a_peers_environment_imports_nothing_of_ours() -> None:
    for module in GUESTS:
        found = set(imports_of(ADAPTERS / PACKAGE / f"{module}.py"))
        ours = {name for name in found if name.startswith(("embedctl", "."))}
        assert ours <= {".serving", ".tokens", ".http_client"}, module


def test_a_class_of_the_users_is_written_as_it_is_configured(tmp_path: Path) -> None:
    options: dict[str, str | int | float | bool] = {"level": 3, "name": 'with "quotes"', "fast": True}
    own = HardwareClass(backend="onnx", prefetch=3, max_abs_error=0.001, models=("a", "b"), options=options)
    config = tmp_path / "embedctl.toml"
    given = {"cache_dir": "/cache", "models": {"m-1.5": {"source": "/größe"}}, "classes": {"mine": asdict(own)}}
    config.write_text(toml(given))
    settings = load_settings({"EMBEDCTL_CONFIG": str(config), "XDG_CONFIG_HOME": str(tmp_path)})
    assert (settings.classes["mine"], settings.models["m-1.5"].source) == (own, "/größe")
    assert settings.cache_dir == "/cache"


def model_folder(folder: Path, *, limit: int | None, positions: int = 512) -> Path:
    folder.mkdir()
    config = {"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    if limit is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit, "do_lower_case": False}))
    (folder / "onnx").mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_model_that_is_set_to_cut_early_is_copied_without(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "source", limit=128)
    model = uncut("m-1", source, tmp_path / "place")
    assert model.folder == tmp_path / "place" / "models" / "m-1"
    assert json.loads((model.folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 512
    assert json.loads((source / "sentence_bert_config.json").read_text())["max_seq_length"] == 128
    assert not (model.folder / "onnx").exists(), "which has the old limit"

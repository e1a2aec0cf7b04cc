"""Other systems' adapters: what runs in their environments, how requests are dealt, and what models they get."""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from embedctl_bench.peers.adapters.embedctl_adapters.embedctl_pipeline import toml
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Answer
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.environments import ADAPTERS, PACKAGE
from embedctl_bench.peers.models import Model, uncut
from embedctl_bench.peers.registry import INFINITY_SERVER, PEERS, Setting, System
from embedctl_bench.peers.tuned import Task, TunedSystem, Workload
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
    *(system.adapter.partition(":")[0].removeprefix(".") for system in (*PEERS.values(), INFINITY_SERVER)),
}


class OneByOne:
    """An engine without a queue: a text's vector is its length, after a moment, and the process that encoded it."""

    def __init__(self, model: Path, threads: int, moment: float = 0.02) -> None:
        self._moment = moment
        self._identity = os.getpid()

    def encode(self, texts: Sequence[str], more: int = 0) -> np.ndarray:
        if "bad" in texts:
            raise ValueError("a bad text")
        if "deadly" in texts:
            sys.stderr.write("no memory\n")
            os._exit(3)
        time.sleep(self._moment * (1 + more))
        return np.array([[len(text), self._identity] for text in texts], np.float64)

    def count(self, texts: Sequence[str]) -> int:
        return sum(map(len, texts))


class Queueing(OneByOne):
    """An engine that takes all requests at once."""

    def requests(self, requests: Sequence[Sequence[str]], callers: int) -> list[Answer]:
        return [Answer(self.encode(texts), 0.0, 1.0, tokens=7) for texts in requests]


TEXTS = ["a", "bb", "ccc"]
REQUESTS = [["a"], ["bb", "b"], ["ccc"], ["dddd"], ["eeeee"]]
Tuned = Callable[..., TunedSystem]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuned]:
    """A system of an adapter above with settings, on a workload of three texts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    workload = Workload("W1", TEXTS, (3,) * len(TEXTS), chunk=1)
    with ExitStack() as stack:

        def made(adapter: str, *settings: Setting) -> TunedSystem:
            system = System("system", "a system", f"{__name__}:{adapter}", settings, ("numpy",))
            cpus = [min(os.sched_getaffinity(0))] * 2
            found = TunedSystem(system, Task(Model("m", tmp_path, 2 * 6 * 12 * 384.0**2), workload, cpus, tmp_path))
            stack.callback(found.close)
            return found

        yield made


@pytest.mark.parametrize("adapter", ["OneByOne", "Queueing"])
def test_requests_are_answered_in_order_by_all_processes(adapter: str, tuned: Tuned) -> None:
    system = tuned(adapter, Setting(2))
    run, vectors = system.requests(REQUESTS)
    assert vectors[:, 0].tolist() == [1, 2, 1, 3, 4, 5]
    assert set(vectors[:, 1]) == set(system.pids)
    assert run.tokens == (16 if adapter == "OneByOne" else 35)
    before = time.monotonic()
    done = system.encode()
    assert done.vectors[:, 0].tolist() == [1, 2, 3]
    assert set(done.vectors[:, 1]) == set(system.pids)
    assert before <= done.began < done.began + 0.02 <= done.ended <= time.monotonic()


def test_a_system_without_a_queue_gets_requests_one_after_the_other(tuned: Tuned) -> None:
    system = tuned("OneByOne", Setting(1))
    at_once, _ = system.requests(REQUESTS)
    assert list(at_once.latencies) == sorted(at_once.latencies), "since all were made"
    assert at_once.latencies[-1] >= 5 * 0.02
    in_turn, _ = system.requests(REQUESTS, callers=1)
    assert 5 * 0.02 <= sum(in_turn.latencies) <= in_turn.seconds
    done = system.encode(repeat=3)
    assert (done.tokens, done.vectors[:, 0].tolist()) == (3 * 6, [1, 2, 3]), "the vectors of the first time"


@pytest.mark.parametrize(
    ("text", "said"), [("bad", "^ValueError: a bad text$"), ("deadly", "^its process ended: no memory$")]
)
def test_what_fails_is_told(text: str, said: str, tuned: Tuned) -> None:
    with pytest.raises(Unavailable, match=said):
        tuned("OneByOne", Setting(2)).requests([["good"], [text]])


def test_the_fastest_setting_that_works_is_chosen(tuned: Tuned) -> None:
    slow, fast = Setting(1, {}, {"more": 9}), Setting(1, {"moment": 0.01})
    system = tuned("OneByOne", slow, fast, Setting(1, {"unknown": 1}), Setting(3))
    assert system.chosen == fast
    assert [sorted(found) for _, found in system.tried] == [["seconds"], ["seconds"], ["error"]], "3 need more CPUs"
    with pytest.raises(Unavailable, match="unknown"):
        tuned("OneByOne", Setting(1, {"unknown": 1}))


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
    assert model.flops_per_token == 2 * 6 * 12 * 384**2
    assert json.loads((model.folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 512
    assert json.loads((source / "sentence_bert_config.json").read_text())["max_seq_length"] == 128
    assert not (model.folder / "onnx").exists(), "which has the old limit"

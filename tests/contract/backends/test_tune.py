"""The processes that `embedctl model tune` measures with, on the dummy backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embedctl_config.errors import ModelError
from embedctl_workers.commands.tune_search import measuring
from embedctl_workers.machine.devices import cores_of
from tests.support.machines import GPUS, play_gpus
from tests.support.processes import before_all_else, children, command_line, is_running
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def _configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "embedctl.toml"
    config.write_text(
        '[classes.paced]\nbackend = "dummy"\noptions = { seconds_per_batch = 0.05 }\n'
        '[classes.odd]\nbackend = "dummy"\noptions = { unknown = 1 }\n'
    )
    monkeypatch.setenv("EMBEDCTL_CONFIG", str(config))
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path / "cache"))


def test_a_model_that_cannot_be_loaded_is_said_so(capfd: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-m", "embedctl_workers.measuring.tune_process", "odd", "dummy"]
    command = [*program, str(min(os.sched_getaffinity(0))), "1"]
    with pytest.raises(ModelError, match="can't be measured"), measuring("dummy", [command]):
        pass
    assert "unknown" in capfd.readouterr().err


# On a GPU

#: A host that can prepare a chunk every 40 ms, and a device that all processes share and that takes 10 ms for one.
SHARED = """
import fcntl, threading, time
import numpy as np
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.models.files import resolve_model

class SharedDevice(DummyBackend):
    OPTIONS = (*DummyBackend.OPTIONS, "device")

    def __init__(self, *, device, **options):
        super().__init__(**options)
        self._device, self._host, self._known = device, threading.Lock(), {}
        self.token_budget = 32_768

    @classmethod
    def load(cls, model, entry, host, options):
        backend = cls(**options)
        backend.fingerprint = resolve_model(model, entry).fingerprint
        return backend

    def tokenize(self, texts, prompt, truncation_side=None):
        with self._host:
            if len(texts) not in self._known:
                self._known[len(texts)] = super().tokenize(texts, prompt, truncation_side)
            time.sleep(0.04)
        return self._known[len(texts)]

    def forward(self, tokens, rows):
        with open(self._device) as device:
            fcntl.flock(device, fcntl.LOCK_EX)
            time.sleep(0.01)
        return np.ones((len(rows), self.dim), np.float32)
"""
REGISTERED = """
from embedctl_workers import backends
backends.BACKENDS["shared"] = ("shared:SharedDevice", "")
"""


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine with a GPU, as its driver tells it. The function sets the options of class `shared` on it."""
    play_gpus(tmp_path / "shared", GPUS[:1])
    for name, value in before_all_else(tmp_path, "shared", REGISTERED, {"shared": SHARED}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "device").touch()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")

    def configure(options: str) -> None:
        with (tmp_path / "embedctl.toml").open("a") as config:
            config.write(
                f'[classes.shared]\ndevice = "gpu"\nbackend = "shared"\nprefetch = 4\n'
                f'options = {{ device = "{tmp_path / "device"}", {options} }}\n'
                f'[models.tuned]\nsource = "{model}"\npooling = "mean"\n'
            )

    return configure


TUNE = ["model", "tune", "tuned", "--class", "shared", "--json"]


@pytest.mark.slow
@pytest.mark.needs("cores")  # one for each worker
def test_a_second_worker_is_found_where_the_host_is_busy(one_gpu: Callable[[str], None], tmp_path: Path) -> None:
    one_gpu("dim = 8")
    cpus = [min(core) for core in cores_of(os.sched_getaffinity(0))[:2]]
    command = [*TUNE, "--cpus", ",".join(map(str, cpus))]
    found = json.loads(run(*command).stdout)
    assert (found["workers"], found["threads"], found["cpus"]) == (2, 1, 2)
    up = run("up", "--dry-run", "--class", "shared", "--model", "tuned", *command[-2:])
    assert up.stdout.count("--gpu-workers 2") == 2
    assert "2 workers of class shared on gpu GPU-1" in up.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "embedctl", *arguments], capture_output=True, text=True, check=True)


def test_a_search_that_is_killed_leaves_no_process_behind(one_gpu: Callable[[str], None]) -> None:
    one_gpu("seconds_to_load = 3600.0")
    process = subprocess.Popen([sys.executable, "-m", "embedctl", *TUNE], stdout=subprocess.DEVNULL)

    def started_ones() -> list[int]:
        return [pid for pid in children(process.pid) if b"measuring.tune_process" in command_line(pid)]

    try:
        eventually(started_ones, what="a measuring process")
        started = started_ones()
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not any(map(is_running, started)), what="the end of the measuring process")

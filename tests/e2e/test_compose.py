"""The services of docker-compose.yml as processes of this machine, and the install steps of the CPU image.

There is no container engine here. What containers add to a process (users, namespaces, a root that can't be written) is
not tested; commands, environments, secrets, mounted files, health checks and install steps are those of the files.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import redis

from embedctl_gateway.access.key_file import add_key
from tests.support.containers import ROOT, Build, Dockerfile, Stack, redis_server
from tests.support.jobs import reference
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.tiny_models import MakeModel

pytestmark = pytest.mark.slow

MODEL = "all-MiniLM-L6-v2"
#: What a service of workers logs when they are ready.
READY = "ready after"
TEXTS = [f"passage {at} of a corpus" for at in range(700)]


def make_secrets(stack: Stack) -> None:
    """Run `setup`; the list for 6.2 where the Redis of this machine is as old."""
    version = subprocess.run([redis_server(), "--version"], capture_output=True, text=True, check=True).stdout
    old = ["/secrets"] if "v=6." in version else []
    done = stack.run("setup", *old)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def stack(short_folder: Path) -> Iterator[Stack]:
    """Services in a folder with a corpus and, after :func:`make_secrets`, the secrets; nothing runs yet."""
    folder = short_folder
    for name in ("models", "data"):
        (folder / name).mkdir()
    (folder / "secrets").mkdir(mode=0o700)
    (folder / "data" / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = folder / "containers.toml"
    variables = {"MODELS_DIR": str(folder / "models"), "DATA_DIR": str(folder / "data")}
    stack = Stack(folder, variables, {"./config/containers.toml": config})
    text = (ROOT / "config" / "containers.toml").read_text()
    config.write_text(
        re.sub(r"(?m)^metrics_address = .+$", f'metrics_address = "127.0.0.1:{stack.metrics_port}"', text)
    )
    with stack:
        yield stack


def start_redis(stack: Stack) -> None:
    make_secrets(stack)
    stack.start("redis", "--port", str(stack.redis_port), "--bind", "127.0.0.1")
    stack.wait_healthy("redis")


def fetched(stack: Stack, hardware: str = "auto") -> np.ndarray:
    """Submit the corpus from the service `cli`, wait, fetch."""
    submitted = stack.run("cli", "submit", "corpus.jsonl", "--class", hardware)
    assert submitted.returncode == 0, submitted.stderr
    done = stack.run("cli", "fetch", submitted.stdout.strip(), "-o", "vectors.npy")
    assert done.returncode == 0, done.stderr
    vectors: np.ndarray = np.load(stack.folder / "data" / "vectors.npy")
    return vectors


def test_the_services_do_a_job_together_show_it_and_stop_when_told(stack: Stack) -> None:
    with (stack.folder / "containers.toml").open("a") as config:
        config.write('\n[classes.cpu]\nbackend = "dummy"\noptions = { dim = 16 }\n')
    start_redis(stack)
    stack.start("cpu")
    stack.start("flower")
    stack.wait_healthy("cpu", logged=READY)
    stack.wait_healthy("flower")

    np.testing.assert_array_equal(fetched(stack), reference(TEXTS))

    with urllib.request.urlopen(f"http://127.0.0.1:{stack.metrics_port}/readyz", timeout=120) as answer:
        assert answer.status == 200
    assert all(json.loads(line)["level"] for line in stack.log("cpu").splitlines())
    assert_the_gateway_answers_those_who_have_a_key(stack)
    with pytest.raises(redis.exceptions.AuthenticationError), redis.Redis(port=stack.redis_port) as nobody:
        nobody.ping()
    for name in reversed(list(stack.processes)):
        assert stack.stop(name) == 0, stack.log(name)
    assert not stack.home.exists(), "the images have no home folder"


def assert_the_gateway_answers_those_who_have_a_key(stack: Stack) -> None:
    stack.start("gateway")
    stack.wait_healthy("gateway")
    key = add_key(stack.folder / "secrets" / "gateway" / "keys", "alice", "search")
    request = urllib.request.Request(
        f"http://127.0.0.1:{stack.gateway_port}/v1/embeddings",
        json.dumps({"model": MODEL, "input": TEXTS[:2]}).encode(),
        {"Authorization": f"Bearer {key}"},
    )

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request.full_url.replace("embeddings", "models"), timeout=60)

    def is_answered() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                rows = [each["embedding"] for each in json.load(answer)["data"]]
        except urllib.error.HTTPError:  # the new key is noticed within a second
            return False
        np.testing.assert_allclose(rows, reference(TEXTS[:2]), atol=1e-6)
        return True

    eventually(is_answered, show=lambda: stack.log("gateway"))


@pytest.mark.timeout(1500)
def test_the_install_steps_of_the_cpu_s_image_make_workers_that_encode(stack: Stack, tiny_model: MakeModel) -> None:
    """The other images build and install the same wheel likewise, with other extras."""
    from tests.support.tiny_models import Tiny

    (stack.folder / "models" / MODEL).symlink_to(tiny_model(Tiny(normalize=True)))
    build = Build(Dockerfile(ROOT / "workers" / "Dockerfile.cpu"), stack.folder / "root")
    build.run()
    assert len(build.left_out) == 1
    for file in ("store/claim.lua", "py.typed"):
        assert list(build.at("/opt/embedctl").glob(f"lib/*/site-packages/embedctl/{file}"))
    listed = "import importlib.metadata as all; print(*{f'{e.name}=={e.version}' for e in all.distributions()})"
    python = [str(build.at("/opt/embedctl/bin/python")), "-c", listed]
    frozen = subprocess.run(python, capture_output=True, text=True, check=True).stdout.split()
    assert "pip" not in {line.partition("==")[0] for line in frozen}
    pinned = {line.partition(" ")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    others = {line.partition("+")[0] for line in frozen} - pinned
    assert not {
        line for line in others if not line.startswith(("nvidia-", "cuda-", "triton", "setuptools=", "embedctl="))
    }
    names = {line.partition("==")[0].lower() for line in frozen}
    assert {"torch", "onnxruntime", "sentence-transformers"} <= names
    assert not any("minilm" in name for name in names)
    start_redis(stack)
    stack.programs = build.at("/opt/embedctl/bin")
    stack.start("cpu")
    stack.wait_healthy("cpu", 300, logged=READY)
    vectors = fetched(stack)
    assert vectors.shape == (len(TEXTS), 32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert list((stack.folder / "volumes" / "cache").iterdir())
    assert "compiled kernels" in stack.log("cpu")
    assert stack.stop("cpu") == 0, stack.log("cpu")

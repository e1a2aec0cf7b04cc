"""The stack as docs/containers.md starts it, with real weights: its jobs, its images, and what its containers reach."""

from __future__ import annotations

import http.server
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from packaging.utils import canonicalize_name

from embedctl import enqueue_embeddings
from embedctl_config.loading import load_settings
from tests.containers.boxes import MODEL, Boxes, docker
from tests.containers.counting import counted
from tests.support.containers import ROOT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TEXTS = [f"passage {at} of a corpus " + "with some words " * (at % 8) for at in range(200)]
BASE = "python:3.11-slim-bookworm"
#: Image → the most bytes that it may add to its base.
SIZES = {"embedctl-cpu:0.1.0": 1.6e9, "embedctl:0.1.0": 250e6}
#: Prints for each HOST:PORT whether a connection was made.
REACH = """
import socket, sys
for place in sys.argv[1:]:
    host, port = place.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 2).close()
        print("reached")
    except OSError:
        print("not")
"""

#: Prints the packages of the environment and their versions, the compilers and what pip may have kept.
LOOK = """
import importlib.metadata, json, pathlib, shutil, sys
ours = [path for path in sys.path if path.startswith("/opt/embedctl")]
print(json.dumps({each.name: each.version for each in importlib.metadata.distributions(path=ours)}))
print([name for name in ("gcc", "cc", "g++", "make") if shutil.which(name)])
print([*pathlib.Path("/root").glob(".cache/*")])
"""


@pytest.fixture
def corpus(real: Boxes) -> str:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (real.folder / "data" / "corpus.jsonl").write_text(lines)
    return "corpus.jsonl"


def vectors(boxes: Boxes, name: str) -> np.ndarray:
    found: np.ndarray = np.load(boxes.folder / "data" / name)
    return found


def test_jobs_from_the_container_and_from_outside_have_the_same_vectors(real: Boxes, corpus: str) -> None:
    job = real.cli("submit", corpus).rstrip("\n")
    assert job.replace("-", "").isalnum(), "the id alone, as scripts take it"
    real.cli("fetch", job, "-o", "within.npy")
    real.outside("submit", corpus, "-o", "outside.npy")
    within, outside = vectors(real, "within.npy"), vectors(real, "outside.npy")
    assert within.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(np.linalg.norm(within, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(within, outside)


def test_the_gateway_answers_who_has_a_key(real: Boxes, corpus: str) -> None:
    key = real.compose(
        *("run", "--rm", "--no-TTY", "--user", f"{os.getuid()}:{os.getgid()}", "--entrypoint", "embedctl", "setup"),
        *("gateway", "key", "add", "alice", "--tenant", "search", "--keys", "/secrets/gateway/keys"),
    ).split()[-1]
    url = f"http://127.0.0.1:{real.gateway_port}/v1/embeddings"
    body = json.dumps({"model": MODEL, "input": TEXTS[:5]}).encode()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(urllib.request.Request(url, body), timeout=60)
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"})

    def answered() -> list[list[float]]:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return [each["embedding"] for each in json.load(answer)["data"]]
        except urllib.error.HTTPError as error:  # the new key is noticed within a second
            return [] if error.code == 401 else [[error.code]]

    eventually(answered, show=lambda: real.log("gateway"))
    real.outside("submit", corpus, "--limit", "5", "-o", "five.npy")
    np.testing.assert_allclose(answered(), vectors(real, "five.npy"), atol=1e-6)


FOREIGN = "12345:12345"


def test_another_user_is_told_in_a_line_that_the_data_are_not_its_own(real: Boxes, corpus: str) -> None:
    told = real.run("cli", "submit", corpus, "-o", "theirs.npy", user=FOREIGN, check=False).strip().splitlines()[-1]
    remedy = f"in /data, which belongs to user {os.getuid()}: run as that user, or chown 12345 /data"
    assert told == f"embedctl: theirs.npy can't be written: permission denied {remedy}"


@pytest.mark.long_fault
def test_a_worker_of_another_user_serves_and_says_why_it_does_without_the_cache(real: Boxes) -> None:
    with real.changed({"cpu": {"user": FOREIGN}}):
        told = real.log("cpu")
    assert "belongs to user 10001, and this is user 12345. To repair it (as root): chown 12345" in told


@pytest.mark.long_fault
def test_a_worker_with_a_full_cache_goes_on_without_it(real: Boxes) -> None:
    texts = [f"text {at} " + "of a job " * (at % 12) for at in range(300)]
    job = enqueue_embeddings(texts, settings=load_settings(real.variables))
    job.wait()
    expected = job.vectors()
    small = {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": "size=64m,uid=10001,gid=10001,mode=755"}}
    with real.changed({"cpu": {"volumes": ["small:/var/cache/embedctl"]}}, volumes={"small": small}):
        fill = "cd /var/cache/embedctl && rm -r kernels; cat /dev/zero > other; test -s other"
        real.compose("exec", "--no-TTY", "cpu", "sh", "-c", fill)
        real.compose("kill", "cpu")
        with counted(real, "the worker starts with a full cache", instead=(texts, expected)):
            real.compose("start", "cpu")


@contextmanager
def listening_everywhere() -> Iterator[int]:
    """A server of this machine, at all of its addresses; its port."""
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_worker_reaches_redis_and_nothing_else(real: Boxes) -> None:
    """And what holds texts beside it, the container of the command line, reaches the gateway and Flower too."""
    gateway_of = docker(
        "network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", f"{real.project}_workers"
    )
    of_bridge = docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", "bridge")
    inspected = json.loads(docker("inspect", real.id("flower"), real.id("gateway")))
    addresses = [net["IPAddress"] for each in inspected for net in each["NetworkSettings"]["Networks"].values()]
    with listening_everywhere() as port:
        places = [
            "redis:6379",
            *(f"{host.strip()}:{port}" for host in (gateway_of, of_bridge)),
            *("flower:5555", "gateway:8080", "1.1.1.1:443"),
            *(f"{address}:{at}" for address in addresses for at in (5555, 8080)),
        ]
        told = real.inside("cpu", REACH, *places).split()
    assert dict(zip(places, told, strict=True)) == {"redis:6379": "reached", **dict.fromkeys(places[1:], "not")}


def test_a_container_may_do_nothing_but_its_work(real: Boxes) -> None:
    for service in ("redis", "cpu", "flower", "gateway"):
        (told,) = json.loads(docker("inspect", real.id(service)))
        assert told["HostConfig"]["ReadonlyRootfs"], service
        assert not any(word.lower().endswith("password") for word in told["Config"]["Env"]), service
        ran = real.compose(
            "exec", "--no-TTY", service, "sh", "-c", "touch /x; id -u; grep CapEff /proc/self/status", check=False
        )
        assert "Read-only file system" in ran, service
        assert "\n0\n" not in ran, f"{service} runs as root"
        assert "CapEff:\t0000000000000000" in ran, service


def added_bytes(image: str) -> int:
    """What an image adds to the base image of this engine."""
    sizes = [int(docker("image", "inspect", "--format", "{{.Size}}", each)) for each in (image, BASE)]
    return sizes[0] - sizes[1]


@pytest.mark.parametrize("image", SIZES)
def test_an_image_is_small_and_has_only_what_runs(images: None, image: str) -> None:
    assert added_bytes(image) <= SIZES[image], f"{added_bytes(image) / 1e6:.0f} MB"
    listed, tools, caches = docker("run", "--rm", "--entrypoint", "python", image, "-c", LOOK).splitlines()
    assert caches == "[]"
    # The compiler makes the kernels for the CPU at hand when a worker first starts.
    assert tools == ("['gcc', 'cc']" if "cpu" in image else "[]")
    packages = json.loads(listed)
    assert {"torch", "onnxruntime", "pip"} & packages.keys() == ({"torch", "onnxruntime"} if "cpu" in image else set())
    pinned = (ROOT / "constraints.txt").read_text()
    found = {f"{canonicalize_name(name)}=={version.partition('+')[0]}" for name, version in packages.items()}
    allowed = {canonicalize_name(name) + rest for name, rest in re.findall(r"(?m)^([\w.-]+)(==\S+)", pinned)}
    assert {each for each in found - allowed if not each.startswith(("setuptools=", "embedctl="))} == set()
    bill = json.loads(docker("run", "--rm", "--entrypoint", "cat", image, "/opt/embedctl/sbom.json"))
    assert bill["bomFormat"] == "CycloneDX"
    assert {each["name"]: each["version"] for each in bill["components"]} == packages
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "password" not in history.lower()


@pytest.mark.long_fault
@pytest.mark.parametrize(
    ("name", "options", "ends_with"),
    [
        # With PyTorch for the CPU, it is built whole.
        ("gpu", ("--build-arg", f"TORCH_OPTIONS={os.environ.get('TORCH_OPTIONS', '')}"), ""),
        ("tensorrt", (), "TENSORRT_OPTIONS is empty: give pip's options from NVIDIA's TensorRT guide"),
        ("neuron", ("--build-arg", "NEURON_BASE=scratch", "--target", "wheel"), ""),
        ("neuron", (), "base name (${NEURON_BASE}) should not be blank"),
    ],
)
def test_images_for_accelerators_are_built_up_to_what_is_out_of_reach(
    images: None, name: str, options: tuple[str, ...], ends_with: str
) -> None:
    file = ROOT / "workers" / f"Dockerfile.{name}"
    told = docker("build", "--quiet", "--file", str(file), *options, str(ROOT), check=not ends_with)
    assert ends_with in told

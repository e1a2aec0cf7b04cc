"""A worker as deploy/kubernetes runs it, on a cache that is made as a cluster makes it.

There is no cluster here: the engine runs the pod's containers with the pod's users, limits and mounts.
"""

from __future__ import annotations

import secrets
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embedctl import enqueue_embeddings
from embedctl_config.loading import load_settings
from tests.containers.boxes import READY_S, Boxes, docker, put_model
from tests.support.containers import ROOT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.long_fault, pytest.mark.timeout(1800)]

FOLDER = ROOT / "deploy" / "kubernetes"
POD: dict[str, Any] = next(yaml.safe_load_all((FOLDER / "worker-cpu.yaml").read_text()))["spec"]["template"]["spec"]
USER = f"{POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
GROUP = POD["securityContext"]["fsGroup"]
(FIRST,) = POD["initContainers"]
(WORKER,) = POD["containers"]
#: What every container of the pod has.
ALONE = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp", "--user", USER)


def as_root(folder: Path, command: str) -> None:
    docker(
        "run", "--rm", "--user", "0:0", "--entrypoint", "sh", "--volume", f"{folder}:/v", WORKER["image"], "-c", command
    )


@pytest.fixture
def volume() -> Iterator[Path]:
    """An emptyDir with fsGroup: root's, of that group, and everybody may write to it."""
    folder = Path(tempfile.mkdtemp(prefix="pod-"))
    as_root(folder, f"chown 0:{GROUP} /v && chmod 2777 /v")
    yield folder
    as_root(folder, "rm -rf /v/*")
    folder.rmdir()


@pytest.fixture(scope="module")
def mounts(boxes: Boxes) -> dict[str, Path]:
    """The pod's volumes, other than its cache, by their names; a Redis without TLS runs for it."""
    put_model(boxes.folder / "models")
    boxes.compose("up", "--detach", "redis")
    boxes.wait_healthy("redis")
    made = {name: boxes.folder / "pod" / name for name in ("settings", "password")}
    for folder in made.values():
        folder.mkdir(parents=True)
    (settings,) = yaml.safe_load_all((FOLDER / "settings.yaml").read_text())
    for name, text in settings["data"].items():
        (made["settings"] / name).write_text(text)
    (made["password"] / "worker").write_bytes((boxes.folder / "secrets" / "worker").read_bytes())
    as_root(made["password"], f"chown 0:{GROUP} /v/worker && chmod 0440 /v/worker")
    return {**made, "models": boxes.folder / "models"}


def mounted(container: dict[str, Any], volumes: dict[str, Path]) -> list[str]:
    options = []
    for each in container["volumeMounts"]:
        if each["name"] in volumes:
            source, mode = volumes[each["name"]] / each.get("subPath", ""), ":ro" if each.get("readOnly") else ""
            options += ["--volume", f"{source}:{each['mountPath']}{mode}"]
    return options


def prepare(volume: Path) -> None:
    """Run the pod's first container."""
    entry, *arguments = FIRST["command"]
    docker("run", "--rm", *ALONE, "--entrypoint", entry, *mounted(FIRST, {"cache": volume}), FIRST["image"], *arguments)


@contextmanager
def started(boxes: Boxes, volumes: dict[str, Path]) -> Iterator[str]:
    """The pod's worker, at the Redis of the stack; its name."""
    name = f"{boxes.project}-pod-{secrets.token_hex(2)}"
    variables = {each["name"]: each["value"] for each in WORKER["env"]}
    del variables["EMBEDCTL_TLS_CA_FILE"]
    variables["EMBEDCTL_REDIS_URL"] = "redis://worker@redis:6379/0"
    named = [word for each, value in variables.items() for word in ("--env", f"{each}={value}")]
    memory = ("--memory", WORKER["resources"]["limits"]["memory"].removesuffix("i"))
    within = ("--detach", "--name", name, "--network", f"{boxes.project}_workers", *memory, *named)
    docker("run", *ALONE, *within, *mounted(WORKER, volumes), WORKER["image"], *WORKER["args"])
    try:
        yield name
    finally:
        docker("rm", "--force", name)


def logged(name: str, words: str) -> None:
    """Wait until the worker has logged this."""
    eventually(lambda: words in docker_log(name), READY_S, what=words, show=lambda: docker_log(name))


def docker_log(name: str) -> str:
    return docker("logs", name, check=False)


def stop(boxes: Boxes, name: str) -> int:
    """SIGTERM; its exit status, which it has before the cluster would kill it."""
    docker("stop", "--time", str(POD["terminationGracePeriodSeconds"]), name)
    return int(boxes.state(name)["ExitCode"])


def test_a_pod_encodes_on_the_cache_of_its_manifest_and_fills_it_once(
    boxes: Boxes, mounts: dict[str, Path], volume: Path
) -> None:
    kept: list[set[Path]] = []
    for _ in range(2):  # a second start of the pod finds what the first one left
        prepare(volume)
        with started(boxes, {**mounts, "cache": volume}) as name:
            job = enqueue_embeddings([f"text {at}" for at in range(50)], settings=load_settings(boxes.variables))
            job.wait()
            np.testing.assert_allclose(np.linalg.norm(job.vectors(), axis=1), 1, atol=1e-5)
            assert stop(boxes, name) == 0
        kept.append({each for each in (volume / "cache" / "kernels").rglob("*") if each.is_file()})
    assert kept[0]
    assert kept[0] == kept[1]


def test_the_top_of_a_volume_is_distrusted_in_a_line_with_the_remedy(
    boxes: Boxes, mounts: dict[str, Path], volume: Path
) -> None:
    as_root(volume, f"mkdir /v/cache && chown 0:{GROUP} /v/cache && chmod 2777 /v/cache")
    with started(boxes, {**mounts, "cache": volume}) as name:
        logged(name, "can be written to by everyone (mode 2777). To repair it (as root): chmod +t /var/cache/embedctl")


def test_sigterm_ends_a_pod_that_still_loads(boxes: Boxes, mounts: dict[str, Path], volume: Path) -> None:
    """The worker is the first process of its container, so nobody else hears the signal for it."""
    prepare(volume)
    with started(boxes, {**mounts, "cache": volume}) as name:
        logged(name, "metrics and health: ")
        assert stop(boxes, name) == 128 + signal.SIGTERM

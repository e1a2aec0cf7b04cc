"""A worker on the cache that deploy/kubernetes gives it, with a volume as a cluster makes it.

There is no cluster here: the engine runs the pod's containers with the pod's users and mounts, one after the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.boxes import MODEL, READY_S, Boxes, docker
from tests.support.containers import ROOT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MANIFEST = next(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "worker-cpu.yaml").read_text()))
POD: dict[str, Any] = MANIFEST["spec"]["template"]["spec"]
USER = f"{POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
ALONE = ("--user", USER, "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp")


@pytest.fixture
def volume() -> Iterator[Path]:
    """An emptyDir with fsGroup: root's, of that group, and everybody may write to it."""
    folder = Path(tempfile.mkdtemp(prefix="pod-"))
    mine = (
        "run",
        "--rm",
        "--user",
        "0:0",
        "--entrypoint",
        "sh",
        "--volume",
        f"{folder}:/v",
        "embedctl-cpu:0.1.0",
        "-c",
    )
    docker(*mine, f"chown 0:{POD['securityContext']['fsGroup']} /v && chmod 2777 /v")
    yield folder
    docker(*mine, "rm -rf /v/*")
    folder.rmdir()


def mount(volume: Path, container: dict[str, Any], sub_path: bool = True) -> str:
    (found,) = [each for each in container["volumeMounts"] if each["name"] == "cache"]
    source = volume / found.get("subPath", "") if sub_path else volume
    return f"{source}:{found['mountPath']}"


def worker(boxes: Boxes, mounted: str) -> list[str]:
    """The pod's container, in the networks and with the settings of the stack."""
    (container,) = POD["containers"]
    return [
        *ALONE,
        *("--network", f"{boxes.project}_workers", "--volume", mounted),
        *("--volume", f"{boxes.folder}/config/containers.toml:/etc/embedctl/embedctl.toml:ro"),
        *("--volume", f"{boxes.folder}/secrets/worker:/run/secrets/embedctl/worker:ro"),
        *("--env", "EMBEDCTL_CONFIG=/etc/embedctl/embedctl.toml", "--env", f"EMBEDCTL_MODEL={MODEL}"),
        *("--env", "EMBEDCTL_REDIS_URL=redis://worker@redis:6379/0"),
        *("--env", "EMBEDCTL_REDIS_PASSWORD_FILE=/run/secrets/embedctl/worker"),
        *(container["image"], *container["args"]),
    ]


def test_a_worker_starts_on_the_cache_of_the_manifests(slow: Boxes, volume: Path) -> None:
    (first,) = POD["initContainers"]
    entry, *arguments = first["command"]
    for _ in range(2):  # a second start of the pod finds what the first one left
        docker(
            "run", "--rm", *ALONE, "--entrypoint", entry, "--volume", mount(volume, first), first["image"], *arguments
        )
    name = f"{slow.project}-pod"
    docker("run", "--detach", "--name", name, *worker(slow, mount(volume, POD["containers"][0])))
    try:
        eventually(
            lambda: docker("exec", name, "embedctl", "worker", "--ready", check=False).startswith("ready"),
            READY_S,
            what="the pod's worker",
            show=lambda: docker("logs", name, check=False),
        )
        assert "torch's own" not in docker("logs", name, check=False)
        assert list((volume / "cache").iterdir())
    finally:
        docker("rm", "--force", name)


def test_on_the_top_of_the_volume_it_refuses_to_start(slow: Boxes, volume: Path) -> None:
    (container,) = POD["containers"]
    told = docker("run", "--rm", *worker(slow, mount(volume, container, sub_path=False)), check=False)
    assert "can be written to by everyone (mode 2777)" in told

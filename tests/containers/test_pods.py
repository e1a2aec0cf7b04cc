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

from tests.containers.boxes import MODEL, docker, put_model
from tests.support.containers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MANIFEST = next(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "worker-cpu.yaml").read_text()))
POD: dict[str, Any] = MANIFEST["spec"]["template"]["spec"]
USER = f"{POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
IMAGE = POD["containers"][0]["image"]
ALONE = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp")


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


def mount(volume: Path, container: dict[str, Any]) -> str:
    (found,) = [each for each in container["volumeMounts"] if each["name"] == "cache"]
    return f"{volume / found.get('subPath', '')}:{found['mountPath']}"


@pytest.fixture(scope="module")
def models(images: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    put_model(folder)
    return folder


def verify(models: Path, mounted: str, user: str = USER) -> str:
    """What a worker's image says of its model and cache, without a network; it loads and keeps as a worker does."""
    (container,) = POD["containers"]
    mounts = ("--volume", f"{models}:/models:ro", "--volume", mounted)
    command = ("model", "verify", MODEL, "--class", "cpu")
    return docker(
        "run", "--rm", "--network", "none", "--user", user, *ALONE, *mounts, container["image"], *command, check=False
    )


def test_the_cache_of_the_manifests_is_trusted_and_filled(models: Path, volume: Path) -> None:
    (first,) = POD["initContainers"]
    entry, *arguments = first["command"]
    for _ in range(2):  # a second start of the pod finds what the first one left
        made = ("--user", USER, "--entrypoint", entry, "--volume", mount(volume, first))
        docker("run", "--rm", *ALONE, *made, first["image"], *arguments)
    told = verify(models, mount(volume, POD["containers"][0]))
    assert "another user could replace" not in told
    assert list((volume / "cache" / "kernels").iterdir())


@pytest.mark.parametrize(
    ("user", "reason"), [(USER, "can be written to by everyone (mode 2777)"), ("12345:12345", "belongs to user")]
)
def test_a_cache_that_others_could_change_is_refused_with_the_remedy(
    models: Path, volume: Path, user: str, reason: str
) -> None:
    """On the top of the volume; and with a folder of it that is another user's."""
    mine = volume / "mine"
    docker("run", "--rm", *ALONE, "--user", USER, "--entrypoint", "mkdir", "--volume", f"{volume}:/v", IMAGE, "/v/mine")
    told = verify(models, f"{volume if user == USER else mine}:/var/cache/embedctl", user).strip().splitlines()[-1]
    assert reason in told
    assert "To repair it (as root): ch" in told

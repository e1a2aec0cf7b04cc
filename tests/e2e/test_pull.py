"""`model pull`, and `--pull` of `run`, `worker` and `up`, with processes that are killed and that start together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.here import Here
from tests.support.hub import StandInHub, stand_in_hub
from tests.support.limits import settings_of
from tests.support.references_here import expected_vectors, keep_references
from tests.support.tiny_models import MakeModel, Tiny
from tests.support.waiting import eventually

NAME = "someone/tiny"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub(tiny_model: MakeModel) -> Iterator[StandInHub]:
    """A hub with a small model that works, and files beside it that nobody needs."""
    folder = tiny_model(Tiny())
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with stand_in_hub() as hub:
        hub.put(NAME, {**files, "pytorch_model.bin": b"a pickle", "README.md": b"about"})
        yield hub


@pytest.fixture
def environment(environment: dict[str, str], hub: StandInHub, tmp_path: Path) -> dict[str, str]:
    """With this hub, and an empty cache."""
    own = {name: value for name, value in environment.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    return {**own, **hub.environment(tmp_path / "home")}


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "embedctl_workers.commands.model", "pull", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_that_pull_at_once_download_once(environment: dict[str, str], hub: StandInHub) -> None:
    environment = environment | {"HF_HUB_DOWNLOAD_TIMEOUT": "600"}  # or a busy machine's first asks for the rest again
    hub.paused = 1000
    first = start(environment, NAME, "--json")
    eventually(lambda: hub.paused is None, what="the first download")
    second = start(environment, NAME, "--if-missing", "--json")
    assert second.stderr is not None
    assert "another process downloads someone/tiny: waiting for it" in second.stderr.readline()
    hub.resumed.set()
    one, other = (json.loads(each.communicate(timeout=60)[0]) for each in (first, second))
    assert one["folder"] == other["folder"]
    assert (one["downloaded"] > 0, other["downloaded"]) == (True, 0)
    assert hub.downloads().count("model.safetensors") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_offers_to_pull_and_does_it(here: Here, hub: StandInHub, tiny_model: MakeModel) -> None:
    keep_references(tiny_model(Tiny()), here.environment["EMBEDCTL_CACHE_DIR"])
    here.environment["EMBEDCTL_REDIS_URL"] = ""
    (here.folder / "corpus.txt").write_text("the text\na word\n")
    command = ("run", "corpus.txt", "--model", NAME, "--class", "cpu", "-o", "vectors.npy")
    said = here.embedctl(*command, status=4).stderr.strip().splitlines()[-1]
    assert said.startswith("embedctl: model 'someone/tiny' is no folder")
    assert said.endswith("get it: embedctl model pull someone/tiny, or add --pull to `embedctl run`, `worker` or `up`")
    assert not hub.asked

    assert "someone/tiny at main is commit" in here.embedctl(*command, "--pull", status=0).stderr
    expected = expected_vectors(tiny_model(Tiny()), ["the text", "a word"])
    np.testing.assert_allclose(np.load(here.folder / "vectors.npy"), expected, rtol=0, atol=1e-5)


def test_a_pull_prints_its_folder_and_the_revision(embedctl: Run, environment: dict[str, str], hub: StandInHub) -> None:
    commit = hub.commit(NAME, "main")
    done = embedctl("model", "pull", f"{NAME}@{commit}", status=0)
    assert done.stdout.strip().endswith(f"/snapshots/{commit}")
    assert f'[models."{NAME}"] with revision = "{commit}"' in done.stderr
    config = Path(environment["EMBEDCTL_CONFIG"])
    config.write_text(f'{config.read_text()}\n[models."{NAME}"]\nrevision = "{commit}"\n')
    assert settings_of(environment).models[NAME].revision == commit
    listed = json.loads(embedctl("model", "list", "--json").stdout)["models"]
    assert [each["folder"] for each in listed if each["name"] == NAME] == [done.stdout.strip()]

"""`model pull`, and `--pull` of `run`, `worker` and `up`, with processes that are killed and that start together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

for _needed in ("torch", "sentence_transformers"):
    pytest.importorskip(_needed)

from tests.support.hub import StandInHub, stand_in_hub  # noqa: E402
from tests.support.limits import settings_of  # noqa: E402
from tests.support.references_here import expected_vectors, keep_references  # noqa: E402
from tests.support.terminal import terminal  # noqa: E402
from tests.support.tiny_models import MakeModel, Tiny  # noqa: E402
from tests.support.waiting import eventually  # noqa: E402

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


def weights(hub: StandInHub) -> bytes:
    commit = hub.commit(NAME, "main")
    assert commit is not None
    return hub.contents[NAME, commit]["model.safetensors"]


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


@pytest.fixture
def referenced(environment: dict[str, str], tiny_model: MakeModel) -> Path:
    """The model's folder, whose references are in the cache."""
    folder = tiny_model(Tiny())
    keep_references(folder, environment["EMBEDCTL_CACHE_DIR"])
    return folder


@pytest.mark.slow
def test_on_a_terminal_a_line_tells_how_far_it_is(environment: dict[str, str], hub: StandInHub) -> None:
    hub.paused = len(weights(hub)) // 2
    with terminal(["model", "pull", NAME], environment, columns=100) as shown:
        shown.until(lambda: hub.paused is None)
        shown.until(lambda: re.search(r"\d+ %: 0\.\d MB of 0\.\d MB", shown.text))
        hub.resumed.set()
        assert shown.ended() == 0
        assert shown.screen[0].startswith("someone/tiny at main is commit")
        assert not any(" %: " in line for line in shown.screen), "the line is gone in the end"
        assert any(line.startswith("fingerprint ") for line in shown.screen)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_offers_to_pull_and_does_it(embedctl: Run, hub: StandInHub, short_folder: Path, referenced: Path) -> None:
    corpus = short_folder / "corpus.txt"
    corpus.write_text("the text\na word\n")
    command = ("run", str(corpus), "--model", NAME, "--class", "cpu", "-o", str(short_folder / "vectors.npy"))
    private = {"EMBEDCTL_REDIS_URL": ""}
    refused = embedctl(*command, **private, status=4)
    said = refused.stderr.strip().splitlines()[-1]
    assert said.startswith("embedctl: model 'someone/tiny' is no folder")
    assert said.endswith("get it: embedctl model pull someone/tiny, or add --pull to `embedctl run`, `worker` or `up`")
    assert not hub.asked

    done = embedctl(*command, "--pull", **private, status=0)
    assert "someone/tiny at main is commit" in done.stderr

    expected = expected_vectors(referenced, ["the text", "a word"])
    np.testing.assert_allclose(np.load(short_folder / "vectors.npy"), expected, rtol=0, atol=1e-5)


def test_a_pull_prints_the_folder_and_how_to_use_a_revision(
    embedctl: Run, environment: dict[str, str], hub: StandInHub
) -> None:
    commit = hub.commit(NAME, "main")
    done = embedctl("model", "pull", f"{NAME}@{commit}", status=0)
    assert done.stdout.strip().endswith(f"/snapshots/{commit}")
    assert f'[models."{NAME}"] with revision = "{commit}"' in done.stderr
    config = Path(environment["EMBEDCTL_CONFIG"])
    config.write_text(f'{config.read_text()}\n[models."{NAME}"]\nrevision = "{commit}"\n')
    assert settings_of(environment).models[NAME].revision == commit
    listed = json.loads(embedctl("model", "list", "--json").stdout)["models"]
    assert [each["folder"] for each in listed if each["name"] == NAME] == [done.stdout.strip()]

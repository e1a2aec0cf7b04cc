"""Each role is installed alone, and its verbs are run to the end: `make roles`.

The tests' own environment has every package, so it can't show that a role lacks one. Here each role gets an environment
of its own, with the versions of constraints.txt and with the newest ones; the gateway gets one on each Python that is
found. A Redis and a worker of this environment serve them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.roles.commands import untried, wrong
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import CONFIG

# `.ci/run` ends a run that is of no use any more: the tests then end what they started.
signal.signal(signal.SIGTERM, signal.default_int_handler)

ROOT = Path(__file__).parents[2]
#: With pip, the installations alone would take minutes.
UV = str(Path(sys.executable).with_name("uv"))
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = ("3.11", "3.12", "3.13")
#: Role → the extra that it needs; the role `bare` needs none.
EXTRAS = {"bare": "", "gateway": "[gateway]", "qdrant": "[qdrant]"}
#: Where the versions come from → options of pip.
SOURCES = {"constraints": ["--constraint", str(ROOT / "constraints.txt")], "newest": []}
TEXTS = ("one", "two words", "three words here")
#: For a command that hangs, not for a slow machine (seconds).
_PATIENCE_S = 300
_COUNT = "import sys, qdrant_client as q; print(q.QdrantClient(path=sys.argv[1]).count('texts').count)"


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end, and return what it printed."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
    assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told to end at the end of the block."""
    with log.open("wb") as output:
        started = subprocess.Popen(command, env=environment, cwd=log.parent, stdout=output, stderr=output)
    try:
        yield started
    finally:
        started.terminate()
        started.wait()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([UV, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)], folder)
    return next(folder.glob("*.whl"))


@pytest.fixture
def environment(redis_server: RedisServer, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of those who use a Redis and a worker of this environment."""
    (tmp_path / "embedctl.toml").write_text(CONFIG)
    foreign = ("EMBEDCTL_", "PYTHON", "VIRTUAL_ENV")
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
        "EMBEDCTL_REDIS_URL": redis_server.url,
        "EMBEDCTL_CONFIG": str(tmp_path / "embedctl.toml"),
        "EMBEDCTL_STATE_DIR": str(tmp_path / "state"),
        "EMBEDCTL_CACHE_DIR": str(tmp_path / "cache"),
    }
    worker = [sys.executable, "-m", "embedctl_workers", "--class", "dummy"]
    with process(worker, tmp_path / "worker.log", variables):
        yield variables


def python_of(version: str) -> str:
    """The executable of a version of Python, on PATH or below PYENV_ROOT; empty if there is none."""
    if version == HERE:
        return sys.executable
    places = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python{version}") or "", *map(str, places.glob(f"{version}.*/bin/python"))]
    # One of pyenv's commands on PATH may only say that its version is not chosen.
    works = (
        each for each in candidates if each and not subprocess.run([each, "-c", ""], capture_output=True).returncode
    )
    return next(works, "")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("version", "role"),
    # The gateway's role has all packages of `bare`, and what that one lacks does not depend on Python's version.
    [(HERE, role) for role in EXTRAS] + [(version, "gateway") for version in PYTHONS if version != HERE],
)
def test_a_role_alone_does_what_it_is_for(
    version: str, role: str, source: str, wheel: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    if not (found := python_of(version)):
        pytest.skip(f"python {version} is neither on PATH nor below PYENV_ROOT")
    run([UV, "venv", "--quiet", "--python", found, "env"], tmp_path)
    python, embedctl = str(tmp_path / "env" / "bin" / "python"), str(tmp_path / "env" / "bin" / "embedctl")
    wanted = f"embedctl{EXTRAS[role]} @ {wheel.as_uri()}"
    run([UV, "pip", "install", "--quiet", "--python", python, *SOURCES[source], wanted], tmp_path)
    records = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(TEXTS)]
    (tmp_path / "c.jsonl").write_text("\n".join(records))
    job = run([embedctl, "submit", "c.jsonl"], tmp_path, environment).strip()
    assert len(run([embedctl, "fetch", job, "-o", "-"], tmp_path, environment).splitlines()) == len(TEXTS)
    assert json.loads(run([embedctl, "status", job, "--json"], tmp_path, environment))["state"] == "completed"
    if role == "bare" and source == "constraints":
        assert [*untried(), *wrong(Path(embedctl), job, tmp_path, environment)] == []
    if role == "qdrant":
        points = tmp_path / "points"
        run([embedctl, "fetch", job, "-o", f"qdrant://{points}?collection=texts"], tmp_path, environment)
        assert int(run([python, "-c", _COUNT, str(points)], tmp_path)) == len(TEXTS)
    if role == "gateway":
        log = tmp_path / "gateway.log"
        with process([embedctl, "gateway", "--address", "0"], log, environment) as gateway:
            assert len(embeddings_of(gateway, log)) == len(TEXTS)


def embeddings_of(gateway: subprocess.Popen[bytes], log: Path) -> list[object]:
    """What a gateway answers that is asked for the vectors of the texts."""

    def address() -> str:
        assert gateway.poll() is None, log.read_text()
        found = re.search(r"http://\S+/v1", log.read_text())
        return found[0] if found else ""

    eventually(address, what="the gateway's start", show=log.read_text)
    asked = Request(f"{address()}/embeddings", json.dumps({"model": "dummy", "input": TEXTS}).encode())
    with urlopen(asked, timeout=_PATIENCE_S) as answer:
        data: list[object] = json.load(answer)["data"]
    return data

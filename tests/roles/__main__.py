"""`python -m tests.roles`: install each role alone, and run its verbs to the end.

The tests' own environment has every package, so it can't show that a role lacks one. Here each role gets an environment
of its own, with the versions of constraints.txt and with the newest ones; the gateway gets one on each Python that is
found. A Redis and a worker of this environment serve them all. Exits with 0 if every role did all that it is for, else
with 1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import CONFIG

ROOT = Path(__file__).parents[2]
#: With pip, the installations alone would take minutes.
UV = str(Path(sys.executable).with_name("uv"))
PYTHONS = ("3.11", "3.12", "3.13")
#: Role → the extra that it needs; the role `bare` needs none.
EXTRAS = {"bare": "", "gateway": "[gateway]", "qdrant": "[qdrant]"}
#: The roles of the Pythons other than this one. The gateway's has all packages of the role `bare`, and what that one
#: lacks does not depend on Python's version.
ELSEWHERE = ("gateway",)
#: Where the versions come from → options of pip.
SOURCES = {"constraints": ["--constraint", str(ROOT / "constraints.txt")], "newest": []}
TEXTS = ("one", "two words", "three words here")
#: Roles that are tried at the same time: each waits for its worker, and for files, about as long as it computes.
SIDE = 2
#: For a command that hangs, not for a slow machine (seconds).
_PATIENCE_S = 300
_COUNT = "import sys, qdrant_client as q; print(q.QdrantClient(path=sys.argv[1]).count('texts').count)"


class Broken(Exception):
    """Raised when a role can't be installed, or does not do what it is for; the message is what was printed."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role to install: its name, the version of Python with its executable, and where the versions come from."""

    name: str
    version: str
    python: str
    source: str


def main() -> int:
    """Try every role that can be tried here, and print one line for each."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ec-") as name:
        folder = Path(name)
        with ThreadPoolExecutor(SIDE) as pool, _serving(folder) as environment:
            wheel = _wheel(folder)
            report = partial(_report, wheel=wheel, folder=folder, environment=environment)
            good = list(pool.map(report, _roles()))
    print(f"{good.count(True)} of {len(good)} roles work alone; {time.monotonic() - began:.0f} s")
    return 0 if all(good) else 1


def _roles() -> Iterator[Role]:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in PYTHONS:
        python = sys.executable if version == here else _python(version)
        if not python:
            print(f"python {version}: not found, neither on PATH nor below PYENV_ROOT", flush=True)
            continue
        for name in EXTRAS if version == here else ELSEWHERE:
            for source in SOURCES:
                yield Role(name, version, python, source)


def _python(version: str) -> str:
    """The executable of a version of Python; empty if there is none."""
    places = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python{version}") or "", *map(str, places.glob(f"{version}.*/bin/python"))]
    return next(filter(_starts, candidates), "")


def _starts(python: str) -> bool:
    """Whether it is more than one of pyenv's commands on PATH, which may only say that its version is not chosen."""
    return bool(python) and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def _wheel(folder: Path) -> Path:
    _run([UV, "build", "--quiet", "--wheel", "--out-dir", str(folder / "wheel"), str(ROOT)], cwd=folder)
    return next(folder.glob("wheel/*.whl"))


@contextmanager
def _serving(folder: Path) -> Iterator[dict[str, str]]:
    """A Redis and a worker of this environment, until the end of the block. Yields the variables of their users."""
    server = RedisServer(folder)
    settings = folder / "embedctl.toml"
    settings.write_text(CONFIG)
    foreign = ("EMBEDCTL_", "PYTHON", "VIRTUAL_ENV")
    own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    variables = {
        "EMBEDCTL_REDIS_URL": server.url,
        "EMBEDCTL_CONFIG": str(settings),
        "EMBEDCTL_STATE_DIR": str(folder / "state"),
        "EMBEDCTL_CACHE_DIR": str(folder / "cache"),
    }
    environment = {**own, **variables}
    server.start()
    try:
        with _process(
            [sys.executable, "-m", "embedctl_workers", "--class", "dummy"], folder / "worker.log", environment
        ):
            yield environment
    finally:
        server.stop()


@contextmanager
def _process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told to end at the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=log.parent, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _report(role: Role, *, wheel: Path, folder: Path, environment: Mapping[str, str]) -> bool:
    """Try a role, print its line, and return whether it did all that it is for."""
    own = folder / f"{role.version}-{role.source}-{role.name}"
    own.mkdir()
    began, done = time.monotonic(), list[str]()
    try:
        for verb in _tried(role, own, wheel, environment):
            done.append(verb)
    except Broken as error:
        outcome = f"FAILED after {done[-1] if done else 'nothing'}\n{error}"
    else:
        outcome = "ok"
    took = f"{time.monotonic() - began:.1f} s"
    print(f"{role.version}  {role.source:<11}  {role.name:<7}  {took:>6}  {', '.join(done)}: {outcome}", flush=True)
    shutil.rmtree(own)
    return outcome == "ok"


def _tried(role: Role, folder: Path, wheel: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Install a role, run its verbs, and yield the name of each after it did what it is for.

    Raises:
        Broken: one did not.
    """
    run = partial(_run, cwd=folder, env=environment)
    run([UV, "venv", "--quiet", "--python", role.python, "env"])
    python, embedctl = str(folder / "env" / "bin" / "python"), str(folder / "env" / "bin" / "embedctl")
    wanted = f"embedctl{EXTRAS[role.name]} @ {wheel.as_uri()}"
    run([UV, "pip", "install", "--quiet", "--python", python, *SOURCES[role.source], wanted])
    yield "install"
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(TEXTS))
    )
    job = run([embedctl, "submit", str(corpus)]).strip()
    yield "submit"
    vectors = run([embedctl, "fetch", job, "-o", "-"]).splitlines()
    _expect(len(vectors), len(TEXTS), "vectors")
    yield "fetch"
    _expect(json.loads(run([embedctl, "status", job, "--json"]))["state"], "completed", "the job's state")
    yield "status"
    if role.name == "qdrant":
        run([embedctl, "fetch", job, "-o", f"qdrant://{folder}/points?collection=texts"])
        _expect(int(run([python, "-c", _COUNT, str(folder / "points")])), len(TEXTS), "points")
        yield "fetch into a database"
    if role.name == "gateway":
        with _process([embedctl, "gateway", "--address", "0"], folder / "gateway.log", environment) as process:
            _ask(process, folder / "gateway.log")
        yield "gateway"


def _ask(process: subprocess.Popen[bytes], log: Path) -> None:
    """Have a gateway embed the texts.

    Raises:
        Broken: it ended, or did not.
    """

    def address() -> str:
        if process.poll() is not None:
            raise Broken(log.read_text())
        found = re.search(r"http://\S+/v1", log.read_text())
        return found[0] if found else ""

    eventually(address, what="the gateway's start", show=log.read_text)
    asked = Request(f"{address()}/embeddings", json.dumps({"model": "dummy", "input": TEXTS}).encode())
    try:
        with urlopen(asked, timeout=_PATIENCE_S) as answer:
            _expect(len(json.load(answer)["data"]), len(TEXTS), "embeddings")
    except OSError as error:
        raise Broken(f"/v1/embeddings: {error}\n{log.read_text()}") from error


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise Broken(f"{what}: {found!r} instead of {expected!r}")


def _run(command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command to its end, and return what it printed.

    Raises:
        Broken: it failed, or hung.
    """
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise Broken(f"{' '.join(command)}: no end after {_PATIENCE_S} s") from error
    if done.returncode:
        raise Broken(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

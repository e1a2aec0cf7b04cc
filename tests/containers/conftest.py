"""Stacks in a container engine: `make containers`. Where no engine answers, all of this is skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.containers.boxes import SLOW_DUMMY, Boxes, put_model
from tests.containers.counting import TABLE


def engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = (["docker", "info"], ["docker", "compose", "version"])
    return all(subprocess.run(each, capture_output=True, timeout=60, check=False).returncode == 0 for each in asked)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of faults, as docs/containers.md has it."""
    for line in TABLE:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The images of this tree, as `docker compose build` makes them. Without an engine, the test is skipped."""
    if not engine_answers():
        pytest.skip("no container engine with Compose v2 answers: `make containers`")
    boxes = Boxes(tmp_path_factory.mktemp("build") / "clone")
    boxes.compose("--progress", "plain", "build", "cpu", "flower")


@pytest.fixture(scope="module")
def boxes(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    """A stack with its secrets and its model; nothing runs yet. A module's own, and what it changes stays changed."""
    made = Boxes(tmp_path_factory.mktemp("stack") / "clone")
    made.set_up()
    try:
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def slow(boxes: Boxes) -> Boxes:
    """Redis and a worker without a model, which fault after fault is done to."""
    with (boxes.folder / "config" / "containers.toml").open("a") as file:
        file.write(SLOW_DUMMY)
    boxes.compose("up", "--detach", "redis", "cpu")
    boxes.wait_ready()
    return boxes


@pytest.fixture(scope="module")
def real(boxes: Boxes) -> Boxes:
    """All services, with the model all-MiniLM-L6-v2 of the package that the extra `minilm` installs."""
    put_model(boxes.folder / "models")
    boxes.compose("--profile", "gateway", "up", "--detach")
    for service in ("redis", "flower", "gateway"):
        boxes.wait_healthy(service)
    boxes.wait_ready()
    return boxes

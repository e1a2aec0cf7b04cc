"""Several hosts on one machine: network, pid and uts namespaces on a switch. Their links can be cut. Needs root."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.processes import children


def why_not() -> str:
    """The reason why hosts can't be made here; empty if they can."""
    if sys.platform != "linux" or os.geteuid():
        return "needs root on Linux"
    name = f"ec{secrets.token_hex(3)}"
    try:
        made = _ip("netns", "add", name, check=False)
    except FileNotFoundError:
        return "needs the command ip (Debian's iproute2)"
    if made.returncode:
        return f"this machine allows no network namespaces: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


@dataclass
class Host:
    """A namespace with its own address and its own pids, like another machine."""

    name: str
    address: str
    switch: str
    port: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command on this host. The pid is that of a parent, which waits for the command and dies with it."""
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [*self._enter(), *command], env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def run(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
        """Run a command on this host to its end. Return its standard output."""
        done = subprocess.run(
            [*self._enter(), *command],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def cut(self) -> None:
        """Pull the cable out: neither side is notified, and nothing is answered."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        """Put the cable back in."""
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def _enter(self) -> list[str]:
        # unshare's child is pid 1 of its namespace, so that `machine_id` tells these hosts apart.
        unshare = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.name, *unshare, "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]


class Network:
    """Hosts on one switch. All of them are removed when the block ends."""

    def __init__(self, count: int) -> None:
        tag = secrets.token_hex(3)
        self._switch = f"ec{tag}s"
        self.hosts = [Host(f"ec{tag}h{at}", f"10.77.0.{at}", self._switch, f"port{at}") for at in range(1, count + 1)]

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            _ip("netns", "add", host.name)
            ends = ["type", "veth", "peer", "name", "eth0", "netns", host.name]
            _ip("-n", self._switch, "link", "add", host.port, *ends)
            _ip("-n", self._switch, "link", "set", host.port, "master", "bridge", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for host in reversed(self.hosts):  # the others need the first host's services to shut down cleanly
            for process in host.processes:
                stop(process)
        for name in (*(host.name for host in self.hosts), self._switch):
            _ip("netns", "delete", name, check=False)


def stop(process: subprocess.Popen[bytes], timeout: float = 30) -> None:
    """End a host's process. SIGTERM goes to the command, because its parent ignores it. Then both get SIGKILL."""
    if process.poll() is None:
        for child in children(process.pid):
            os.kill(child, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    process.kill()  # --kill-child kills the command as well
    process.wait()


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)

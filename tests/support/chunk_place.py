"""A place outside of Redis for the bytes of chunks, which can be taken away for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.processes import free_ports
from tests.support.waiting import eventually


class Forgetful:
    """A Redis that knows of no place yet."""

    def database(self) -> str:
        return "17"

    def place_at(self, address: str) -> str | None:
        return None

    def note(self, address: str, place_id: str) -> None:
        pass


class ChunkPlace:
    """A folder, or a bucket of a server of its own; nothing if chunks are in Redis.

    Attributes:
        environment: what leads a process to it.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._folder = folder / "chunks"
        self._process: subprocess.Popen[bytes] | None = None
        self.away = False
        self.environment: dict[str, str] = {}
        if kind != "redis":
            self.environment = {"LIMIT_CHUNK_INLINE_BYTES": "0", "EMBEDCTL_CHUNK_FILES": str(self._folder)}
        if kind == "s3":
            self._start_server(folder)

    def _start_server(self, folder: Path) -> None:
        (port,) = free_ports(1)
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "chaos",
            "AWS_SECRET_ACCESS_KEY": "chaos",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with (folder / "s3.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
            )
        os.environ |= variables
        import boto3

        client = boto3.client("s3")

        def made() -> bool:
            try:
                client.create_bucket(Bucket="chaos")
            except Exception:  # noqa: BLE001  (it is starting)
                return False
            return True

        eventually(made, what="the bucket")
        self.environment |= {**variables, "EMBEDCTL_CHUNK_FILES": "s3://chaos/chunks"}

    def leave(self) -> None:
        """Be away: a folder that is not mounted, or a server that does not answer."""
        self.away = True
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
        elif self._folder.exists():
            self._folder.rename(self._folder.with_name("chunks.away"))

    def return_(self) -> None:
        """Be there again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        elif self._folder.with_name("chunks.away").exists():
            self._folder.with_name("chunks.away").rename(self._folder)
        self.away = False

    def stop(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

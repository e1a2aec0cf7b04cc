"""A real Redis that tests start on its own unix socket and end by pid."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import redis as redis_py

from embedctl.operating.acl import ADMIN, access_list, read_passwords
from embedctl.operating.local import _redis_server
from embedctl_config.hardware import HardwareClass
from tests.support.waiting import PATIENCE_S, eventually

CONFIG = Path(__file__).parents[2] / "config" / "embedctl_config" / "redis.conf"

#: Short times, so that a wait for a lease takes only a second in tests.
QUICK = {"lease_s": 1.0}

#: Hardware classes for tests: without a model, and as slow as a test needs.
CLASSES = {
    "cpu": HardwareClass(),
    "dummy": HardwareClass(backend="dummy", options={"dim": 16}),
    "half": HardwareClass(backend="dummy", precision="fp16", options={"dim": 16}),
    "colbert": HardwareClass(backend="dummy", options={"dim": 16, "outputs": "multi"}),
    "slow": HardwareClass(backend="dummy", token_budget=64, options={"dim": 16, "seconds_per_batch": 0.1}),
}

#: The path, inode and length of an append-only file.
Written = tuple[Path, int, int]


@dataclass
class RedisServer:
    """A redis-server that a test may stop and start again. Its data stays in its folder."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    extra: list[str] = field(default_factory=list)
    binary: str = ""
    config: Path = CONFIG
    passwords: Mapping[str, str] = field(default_factory=dict)

    #: Servers with an access list, by the URL that their producer uses.
    restricted: ClassVar[dict[str, RedisServer]] = {}

    @property
    def url(self) -> str:
        """The URL for a test's own requests. With an access list, its user may do everything."""
        return self.url_of(ADMIN)

    def url_of(self, user: str) -> str:
        """The URL of a user of the access list. Without a list, all users share one URL."""
        login = f"{user}:{self.passwords[user]}@" if self.passwords else ""
        return f"unix://{login}{self.folder}/redis.sock"

    def restrict(self, *, redis_7: bool = False) -> None:
        """From the next start on, admit only the users of `embedctl config acl`."""
        passwords, _ = read_passwords(self.folder / "passwords")
        users = self.folder / "users.acl"
        users.write_text(access_list(passwords, database=0, redis_7=redis_7))
        self.passwords = {user: each[0] for user, each in passwords.items()}
        self.extra = [*self.extra, "--aclfile", str(users)]
        self.restricted[self.url_of("producer")] = self

    def start(self) -> None:
        command = [self.binary or _redis_server(), str(self.config), "--port", "0", "--dir", str(self.folder)]
        command += ["--unixsocket", f"{self.folder}/redis.sock", *self.extra]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        process = self.process

        def answers() -> bool:
            assert process.poll() is None, self.log()
            with suppress(redis_py.exceptions.ConnectionError), redis_py.Redis.from_url(self.url) as client:
                return bool(client.ping())
            return False

        eventually(answers, what="Redis' start", show=self.log)

    def log(self) -> str:
        return (self.folder / "redis.log").read_text()[-2000:]

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
            self.process = None

    def written(self) -> Written | None:
        """The path, inode and length of the append-only file now. None while it is being rewritten."""
        files = [*self.folder.glob("appendonlydir/*.incr.aof"), *self.folder.glob("appendonly.aof")]
        with redis_py.Redis.from_url(self.url, socket_timeout=10) as client:
            if len(files) != 1 or client.info("persistence")["aof_rewrite_in_progress"]:
                return None
        found = files[0].stat()
        return files[0], found.st_ino, found.st_size

    def rewind(self, written: Written) -> bool:
        """Make a stopped Redis forget everything it wrote since then. False if its file was rewritten meanwhile."""
        file, inode, size = written
        found = file.stat() if file.exists() else None
        if found is None or found.st_ino != inode or found.st_size < size:
            return False
        os.truncate(file, size)
        return True

    def forget_since(self, written: Written) -> None:
        """Crash, and come back as if the end of the append-only file had not reached the disk."""
        assert self.process is not None
        self.process.kill()
        self.stop()
        assert self.rewind(written)
        self.start()


def as_user(environment: Mapping[str, str], user: str) -> dict[str, str]:
    """A producer's environment, changed to another user of its Redis. Without an access list it stays the same."""
    server = RedisServer.restricted.get(environment["EMBEDCTL_REDIS_URL"])
    return {**environment, "EMBEDCTL_REDIS_URL": server.url_of(user)} if server else dict(environment)


@contextmanager
def emptied(server: RedisServer) -> Iterator[None]:
    """A Redis without the data of earlier tests. At the end, asserts that it denied none of this test's commands."""
    client = redis_py.Redis.from_url(server.url)
    client.flushall()
    client.acl_log_reset()
    yield
    # Clients introduce themselves with CLIENT SETINFO, and `doctor` reads CONFIG. Both cope with a denial.
    denied = [each for each in client.acl_log() if not str(each["object"]).startswith(("client", "config"))]
    client.close()
    assert not denied

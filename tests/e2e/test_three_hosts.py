"""Three hosts, with TLS and users: Redis on one, workers on two, a producer beside one of them; a link is cut."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from embedctl.operating.acl import access_list, read_passwords
from tests.support.hosts import Host, Network, why_not
from tests.support.jobs import reference
from tests.support.redis_server import CONFIG as REDIS_CONFIG
from tests.support.tls import need_tls_redis
from tests.support.waiting import eventually
from tests.support.workers import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.skipif(bool(why_not()), reason=why_not())]

TEXTS = [f"text number {i} " + "word " * (i % 40) for i in range(2400)]
PORT = 6390
#: For how long the cable is out: more than a lease, a heartbeat and the sockets' time-outs.
CUT_S = 25.0


@dataclass
class Hosts:
    """Where Redis runs, and two hosts with a worker each."""

    redis: Host
    near: Host
    far: Host
    folder: Path

    def environment(self, user: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDCTL_")}
        return {
            **own,
            "EMBEDCTL_CONFIG": str(self.folder / "embedctl.toml"),
            "EMBEDCTL_REDIS_URL": f"rediss://{user}@{self.redis.address}:{PORT}/0",
            "EMBEDCTL_REDIS_PASSWORD_FILE": str(self.folder / "passwords" / user),
            "EMBEDCTL_TLS_CA_FILE": str(self.folder / "ca.pem"),
            "EMBEDCTL_STATE_DIR": str(self.folder / "state"),
            "EMBEDCTL_CACHE_DIR": str(self.folder / "cache"),
        }

    def start_worker(self, host: Host) -> None:
        command = [sys.executable, "-m", "embedctl_workers", "--class", "slow", "--model", "dummy"]
        host.start(command, self.folder / f"{host.name}.log", self.environment("worker"))

    def logged(self, word: str, *hosts: Host) -> int:
        """How often the workers of these hosts have logged a word: to ask Redis takes a new process there."""
        return sum((self.folder / f"{host.name}.log").read_text(errors="replace").count(word) for host in hosts)

    def embedctl(self, *arguments: str) -> str:
        """The command line, on the host that keeps its link."""
        command = [sys.executable, "-m", "embedctl", *arguments]
        return self.near.run(command, self.environment("producer"), timeout=180)

    def status(self, *job_id: str) -> dict[str, Any]:
        """Of everything, or of a job."""
        shown: dict[str, Any] = json.loads(self.embedctl("status", *job_id, "--json"))
        return shown


@pytest.fixture
def hosts(short_folder: Path) -> Iterator[Hosts]:
    binary = need_tls_redis()
    (short_folder / "embedctl.toml").write_text(CONFIG.replace("lease_s = 1.0", "lease_s = 3.0"))
    with Network(3) as network:
        redis, near, far = network.hosts
        hosts = Hosts(redis, near, far, short_folder)
        _start_redis(hosts, binary)
        yield hosts
    for log in sorted(short_folder.glob("*.log")):  # shown where the test fails
        print(f"{log.name}:\n{log.read_text(errors='replace')[-4000:]}")


def _start_redis(hosts: Hosts, binary: str) -> None:
    folder = hosts.folder
    passwords, _ = read_passwords(folder / "passwords")
    (folder / "users.acl").write_text(access_list(passwords, database=0))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.issue_cert(hosts.redis.address).private_key_and_cert_chain_pem.write_to_path(folder / "redis.pem")
    command = [binary, str(REDIS_CONFIG), "--port", "0", "--tls-port", str(PORT), "--bind", hosts.redis.address]
    command += ["--tls-cert-file", str(folder / "redis.pem"), "--tls-key-file", str(folder / "redis.pem")]
    command += ["--tls-ca-cert-file", str(folder / "ca.pem"), "--tls-auth-clients", "no"]
    command += ["--aclfile", str(folder / "users.acl"), "--dir", str(folder)]
    hosts.redis.start(command, folder / "redis.log", os.environ)


def test_a_host_that_is_cut_off_for_a_while_costs_nothing(hosts: Hosts) -> None:
    hosts.start_worker(hosts.near)
    hosts.start_worker(hosts.far)
    eventually(lambda: hosts.logged("ready in", hosts.near) and hosts.logged("ready in", hosts.far), what="two workers")
    corpus = hosts.folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    job_id = hosts.embedctl("submit", str(corpus), "--class", "slow", "--chunk-size", "20", "--quiet").strip()
    eventually(lambda: hosts.logged("succeeded", hosts.near, hosts.far) >= 10, what="ten chunks")
    hosts.far.cut()
    at_the_cut = hosts.status(job_id)
    time.sleep(CUT_S)
    while_cut = hosts.status(job_id)
    hosts.far.mend()
    vectors = hosts.folder / "vectors.npy"
    hosts.embedctl("fetch", job_id, "-o", str(vectors), "--quiet")

    assert at_the_cut["done"] < while_cut["done"] < len(TEXTS), "one host worked on while the other was away"
    done = hosts.status(job_id)
    assert (done["state"], done["done"], done["failed"]) == ("completed", len(TEXTS), 0)
    assert done["lapsed"] >= 1, "the host that was cut off held a chunk"
    np.testing.assert_array_equal(np.load(vectors), reference(TEXTS))
    # The host that was cut off recovered without help.
    eventually(lambda: len(hosts.status()["workers"]) == 2, what="both workers")

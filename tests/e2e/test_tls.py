"""TLS: the checks that are on by default, and that no password is ever shown."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import redis as redis_py
import trustme
from kombu.exceptions import OperationalError

from embedctl import BrokerUnavailable, enqueue_embeddings
from embedctl.operating.acl import ADMIN, USERS
from embedctl.store import Connection
from embedctl_config.celery_app import make_celery
from embedctl_config.settings import Settings
from tests.support.dashboard import PAGES, dashboard
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.redis_server import RedisServer
from tests.support.tls import TlsRedis, need_tls_redis
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

TEXTS = [f"text {i} " + "word " * (i % 30) for i in range(100)]


@pytest.fixture
def redis_server(short_folder: Path, free_port: int) -> Iterator[TlsRedis]:
    """A Redis with TLS and an access list. It is stopped until a test starts it."""
    folder = short_folder / "redis"
    folder.mkdir()
    server = TlsRedis(folder, binary=need_tls_redis(), port=free_port)
    server.restrict(redis_7=True)
    server.certify("localhost")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def environment(environment: dict[str, str], redis_server: TlsRedis) -> dict[str, str]:
    return {**environment, **login(redis_server, "producer")}


def login(server: TlsRedis, user: str) -> dict[str, str]:
    """The environment that makes a process a user. The password is in a file."""
    return {
        "EMBEDCTL_REDIS_URL": f"rediss://{user}@localhost:{server.port}/0",
        "EMBEDCTL_REDIS_PASSWORD_FILE": str(server.folder / "passwords" / user),
        "EMBEDCTL_TLS_CA_FILE": str(server.ca_file),
    }


def refusals(settings: Settings) -> Iterator[str]:
    """The messages of redis-py and of kombu. Both must refuse."""
    with pytest.raises(BrokerUnavailable) as refused:
        Connection(settings).now_ms()
    yield str(refused.value)
    with pytest.raises(OperationalError) as refused_by_kombu:
        make_celery(settings).connection_for_write().ensure_connection(max_retries=1, interval_start=0)
    yield str(refused_by_kombu.value)


def test_a_job_with_tls_users_and_password_files_and_no_password_is_ever_shown(
    here: Here, environment: dict[str, str], redis_server: TlsRedis
) -> None:
    environment |= {**login(redis_server, "worker"), "EMBEDCTL_LOG_LEVEL": "debug"}
    worker = here.start_worker("slow", forked=False)  # its arguments are looked at
    environment |= login(redis_server, "flower")
    users = here.folder / "users"
    users.write_text("kim:fl0w3r-password\n")
    with dashboard(environment, here.folder, "--auth-file", str(users)) as flower:
        environment |= login(redis_server, "producer")
        kim = {"Authorization": f"Basic {b64encode(b'kim:fl0w3r-password').decode()}"}
        eventually(lambda: worker.row().name in flower.get("/workers?json=1", **kim)[1])  # it gets events
        job = enqueue_embeddings(TEXTS, hardware="slow", chunk_size=20, settings=here.settings)
        job.wait(timeout=60)
        np.testing.assert_array_equal(job.vectors(), reference(TEXTS))

        page = f"/worker/{quote(worker.row().name, safe='')}"
        eventually(lambda: flower.get(page, **kim)[0] == 200)
        eventually(lambda: job.id in flower.get("/api/tasks", **kim)[1])
        eventually(lambda: json.loads(flower.get("/api/workers", **kim)[1])[worker.row().name].get("stats"))
        shown = [flower.get(path, **kim)[1] for path in (*PAGES, page)]

        shown += [path.read_text(errors="replace") for path in here.folder.rglob("*.log")]
        for command in (["config", "show"], ["config", "show", "--json"], ["doctor"], ["list"], ["status", job.id]):
            done = here.embedctl(*command, status=0)
            shown += [done.stdout, done.stderr]
        shown += _command_lines()
        shown.append(repr([here.settings, here.broker, here.broker.connection, job]))
        flower_app = make_celery(here.settings.replace(**_as_settings(login(redis_server, "flower"))))
        asked = flower_app.control.inspect([worker.row().name], timeout=PATIENCE_S)
        shown += [json.dumps(asked.stats()), json.dumps(asked.conf())]
        assert worker.row().name in shown[-2]
        assert "broker_url" in shown[-1]
    _assert_no_secret(redis_server, "".join(shown))
    assert "fl0w3r-password" not in "".join(shown)


def _command_lines() -> list[str]:
    """The command lines of all processes, as `ps` shows them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found.append(path.read_text(errors="replace"))
    assert any("embedctl_workers" in line for line in found)
    return found


def _as_settings(variables: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("EMBEDCTL_").lower(): value for name, value in variables.items()}


def _assert_no_secret(server: TlsRedis, shown: str) -> None:
    assert len(server.passwords) == len((*USERS, ADMIN))
    assert not [user for user, password in server.passwords.items() if password in shown]


@pytest.mark.parametrize(
    ("name", "options", "host", "words"),
    [
        ("localhost", {"authority": trustme.CA()}, "localhost", "unable to get local issuer certificate"),
        ("redis.example", {}, "localhost", "Hostname mismatch, certificate is not valid for 'localhost'"),
        ("localhost", {}, "127.0.0.1", "IP address mismatch, certificate is not valid for '127.0.0.1'"),
        ("localhost", {"expired": True}, "localhost", "certificate has expired"),
    ],
    ids=["by somebody else", "for another host", "for the name", "too long ago"],
)
def test_a_wrong_certificate_is_refused(
    name: str, options: dict[str, Any], host: str, words: str, redis_server: TlsRedis
) -> None:
    redis_server.stop()
    redis_server.certify(name, **options)
    redis_server.start()
    settings = Settings(redis_url=redis_server.tls_url("producer", host), tls_ca_file=str(redis_server.ca_file))
    ours, kombus = refusals(settings)
    assert words in ours
    assert "tls_ca_file" in ours
    assert "CERTIFICATE_VERIFY_FAILED" in kombus
    _assert_no_secret(redis_server, ours + kombus)


def test_only_the_systems_authorities_are_trusted_unless_another_is_named(redis_server: TlsRedis) -> None:
    for said in refusals(Settings(redis_url=redis_server.tls_url("producer"))):
        assert "certificate" in said
    named = Settings(redis_url=redis_server.tls_url("producer"), tls_ca_file=str(redis_server.ca_file))
    assert Connection(named).now_ms() > 0
    in_the_url = Settings(redis_url=f"{redis_server.tls_url('producer')}?ssl_ca_certs={redis_server.ca_file}")
    assert Connection(in_the_url).now_ms() > 0
    with make_celery(in_the_url).connection_for_write() as connection:
        connection.ensure_connection(max_retries=1)


def test_insecure_checks_nothing_and_says_so(here: Here, environment: dict[str, str], redis_server: TlsRedis) -> None:
    redis_server.stop()
    redis_server.certify("redis.example", authority=trustme.CA())
    redis_server.start()
    by_flag = here.embedctl("--insecure", "list", status=0)
    assert "is not checked (insecure)" in by_flag.stderr
    environment |= {**login(redis_server, "worker"), "EMBEDCTL_INSECURE": "1"}
    worker = here.start_worker(wait=False)
    eventually(lambda: worker.logged(" ready."))  # its queues are kombu's
    assert "is not checked (insecure)" in worker.log()
    _assert_no_secret(redis_server, by_flag.stderr + worker.log())


def test_clients_may_show_a_certificate_of_their_own(redis_server: TlsRedis, short_folder: Path) -> None:
    redis_server.stop()
    redis_server.extra += ["--tls-auth-clients", "yes"]
    redis_server.start()
    mine = redis_server.authority.issue_cert("worker@host")
    mine.private_key_pem.write_to_path(short_folder / "me.key")
    mine.cert_chain_pems[0].write_to_path(short_folder / "me.crt")
    plain = Settings(redis_url=redis_server.tls_url("producer"), tls_ca_file=str(redis_server.ca_file))
    with pytest.raises(BrokerUnavailable):
        Connection(plain).now_ms()
    shown = f"?ssl_certfile={short_folder}/me.crt&ssl_keyfile={short_folder}/me.key"
    settings = plain.replace(redis_url=plain.redis_url + shown)
    assert Connection(settings).now_ms() > 0
    with make_celery(settings).connection_for_write() as connection:
        connection.ensure_connection(max_retries=1)


def test_without_tls_nobody_is_let_in(redis_server: TlsRedis) -> None:
    url = redis_server.tls_url("producer").replace("rediss://", "redis://")
    with pytest.raises(BrokerUnavailable, match=r"If this port speaks TLS, write rediss:// \(with two s\)"):
        Connection(Settings(redis_url=url)).now_ms()
    with pytest.raises(redis_py.exceptions.AuthenticationError):
        redis_py.Redis.from_url(f"unix://{redis_server.folder}/redis.sock").get("key")


@pytest.fixture
def plain_redis(short_folder: Path, free_port: int) -> Iterator[RedisServer]:
    """A Redis without TLS at `free_port`."""
    folder = short_folder / "plain"
    folder.mkdir()
    server = RedisServer(folder, extra=["--port", str(free_port), "--bind", "127.0.0.1"])
    server.start()
    yield server
    if server.process is not None:
        server.stop()


@pytest.mark.usefixtures("plain_redis")
def test_tls_at_a_port_without_it_names_the_other_scheme_once(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.store.connection._SOCKET_TIMEOUT_S", 2)
    tries: list[object] = []
    connect: Callable[[Any], object] = redis_py.SSLConnection._connect

    def noted(self: object) -> object:
        tries.append(self)
        return connect(self)

    monkeypatch.setattr(redis_py.SSLConnection, "_connect", noted)
    with pytest.raises(BrokerUnavailable, match=r"If this port does not speak TLS, write redis:// \(with one s\)"):
        Connection(Settings(redis_url=f"rediss://:secret@localhost:{free_port}/0")).now_ms()
    assert len(tries) == 1


def test_a_redis_that_goes_away_is_not_of_another_scheme(plain_redis: RedisServer, free_port: int) -> None:
    connection = Connection(Settings(redis_url=f"redis://localhost:{free_port}/0"))
    connection.now_ms()
    plain_redis.stop()
    with pytest.raises(BrokerUnavailable, match="Does it run") as raised:
        connection.now_ms()
    assert "TLS" not in str(raised.value)

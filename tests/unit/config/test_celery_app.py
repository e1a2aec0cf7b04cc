"""The Celery application: one configuration for every process, URLs that kombu understands, and the bells of
scripts, which it understands."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection
from kombu.transport.redis import Channel
from redis import ConnectionPool, Redis

from embedctl.store.scripts import BELL
from embedctl_config import keys
from embedctl_config.celery_app import make_celery
from embedctl_config.errors import SettingsError
from embedctl_config.redis_url import sentinels_of
from embedctl_config.settings import Settings

URLS = [
    ("redis://localhost:6380/2", "redis://localhost:6380/2"),
    ("redis://user:p%40ss%2Fw@host:1/0", "redis://user:p%40ss%2Fw@host:1/0"),
    ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
    ("redis://host:6379?db=3", "redis://host:6379/3"),
    ("unix:///run/redis.sock?password=p%40ss", "redis+socket://:p%40ss@/run/redis.sock"),
    ("unix:///run/redis.sock?db=3", "redis+socket:///run/redis.sock?virtual_host=3"),
    ("unix://me:secret@/run/redis.sock", "redis+socket://me:secret@/run/redis.sock"),
]


def broker_url(url: str) -> str:
    return make_celery(Settings(redis_url=url)).conf.broker_url


def connection(url: str, **settings: Any) -> Connection:
    return make_celery(Settings(redis_url=url, **settings)).connection_for_read()


@pytest.mark.parametrize(("url", "expected"), URLS)
def test_urls_are_those_of_kombu(url: str, expected: str) -> None:
    assert broker_url(url) == expected


def test_tls_checks_certificate_and_name_and_stands_where_flower_looks_for_it() -> None:
    app = make_celery(Settings(redis_url="rediss://host:6379/0?ssl_certfile=/me.pem&ssl_keyfile=/me.key"))
    checks = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    assert app.conf.broker_url == "rediss://host:6379/0"
    assert app.conf.broker_use_ssl == {"ssl_certfile": "/me.pem", "ssl_keyfile": "/me.key", **checks}
    assert Channel.connection_class_ssl is not None
    made = Channel.connection_class_ssl(**app.conf.broker_use_ssl)
    assert (made.cert_reqs.name, made.check_hostname) == ("CERT_REQUIRED", True)


def test_tls_is_unchecked_only_where_that_is_said() -> None:
    unchecked = {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    assert connection("rediss://host/0", insecure=True).ssl == unchecked
    assert connection("redis://host/0", insecure=True).ssl is None


@pytest.mark.parametrize(
    "url",
    ["unix://me:hunter2@/run/redis.sock", "unix:///run/redis.sock?password=hunter2", "rediss://h?ssl_password=hunter2"],
)
def test_what_a_connection_says_of_itself_holds_no_password(url: str) -> None:
    # `inspect stats` leaves out `password`, and sends everything else to any client that asks.
    found = connection(url)
    assert "hunter2" not in str({**found.info(), "password": ""})
    assert "hunter2" not in found.as_uri() + repr(found)


def test_an_empty_url_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="EMBEDCTL_REDIS_URL"):
        make_celery(Settings())


def test_a_bell_is_the_message_that_celery_sends_for_its_task() -> None:
    app = make_celery(Settings(redis_url="redis://localhost"))
    with Connection("memory://") as connection:
        app.send_task(keys.TASK, task_id="id", queue="embed.dummy.dummy", producer=connection.Producer())
        channel: Any = connection.default_channel  # whose stubs do not know what virtual transports have
        sent = channel._get("embed.dummy.dummy")
    bell = json.loads(Template(BELL).substitute(id="id", queue="embed.dummy.dummy"))
    headers = sent["headers"]
    left_out = {name: headers.pop(name) for name in set(headers) - set(bell["headers"])}
    assert left_out.pop("timelimit") == [None, None]
    assert set(left_out) == {
        "shadow", "eta", "expires", "group_index", "retries", "replaced_task_nesting", "stamped_headers", "stamps",
    }  # fmt: skip
    assert not any(left_out.values())  # what workers take them for where they are missing
    own: list[tuple[str, dict[str, object]]] = [
        ("headers", {"origin": "embedctl", "ignore_result": True}),
        ("properties", {"reply_to": "", "delivery_tag": "id"}),
    ]
    for part, facts in own:
        assert facts.items() <= bell[part].items()
        assert set(facts) <= set(sent[part])
        sent[part].update(facts)
    assert bell == sent


def test_a_channel_keeps_its_client_until_its_connections_are_replaced() -> None:
    transport: Any = make_celery(Settings(redis_url="redis://localhost")).connection_for_write().get_transport_cls()
    channel = transport.Channel.__new__(transport.Channel)
    pools = [ConnectionPool(), ConnectionPool()]
    channel._pool, channel.Client, channel.connection = pools[0], Redis, SimpleNamespace(client="of kombu")
    with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second, channel.conn_or_acquire(7) as given:
        assert first is second
        assert (first.connection_pool, given) == (pools[0], 7)
    channel._pool = pools[1]  # as kombu does after a lost connection
    with channel.conn_or_acquire() as third:
        assert third.connection_pool is pools[1]


def test_kombu_asks_every_sentinel_and_shows_no_password() -> None:
    url = "redis+sentinel://me:p%40ss@a:1,b:2/mine/4"
    assert broker_url(url) == "sentinel://me:p%40ss@a:1/4;sentinel://me:p%40ss@b:2/4"
    found = connection(url)
    assert (found.transport_options or {})["master_name"] == "mine"
    assert (found.userid, found.password, found.virtual_host) == ("me", "p@ss", "4")
    facts = {name: value for name, value in found.info().items() if name != "password"}
    assert "p%40ss" not in str(facts)
    assert "p@ss" not in str(facts)


def test_the_password_of_sentinels_is_read_anew_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2\n")
    settings = Settings(redis_url="redis+sentinel://a:1,b:2/mine", sentinel_password_file=str(file))
    app = make_celery(settings)
    found = app.connection_for_read()
    password = (found.transport_options or {})["sentinel_kwargs"]["credential_provider"]
    assert password.get_credentials() == ("hunter2",)
    file.write_text("hunter3\n")
    assert password.get_credentials() == ("hunter3",)
    json.dumps(found.info())  # workers send it to anyone who inspects them
    shown = f"{found.info()} {app.conf.table(with_defaults=False, censored=True)} {sentinels_of(settings)}"
    assert "hunter" not in shown

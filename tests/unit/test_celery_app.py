"""The Celery application: one configuration for every process, and URLs that kombu understands."""

from __future__ import annotations

import pytest
from kombu import Connection

from embedctl_config.celery_app import broker_url, make_celery
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings

URLS = [
    ("redis://localhost", "redis://localhost"),
    ("redis://localhost:6380/2", "redis://localhost:6380/2"),
    ("redis://user:p%40ss%2Fw@host:1/0", "redis://user:p%40ss%2Fw@host:1/0"),
    ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
    ("unix:///run/redis.sock", "redis+socket:///run/redis.sock"),
    ("unix:///run/redis.sock?db=3", "redis+socket:///run/redis.sock?virtual_host=3"),
    ("unix://me:secret@/run/redis.sock", "redis+socket://me:secret@/run/redis.sock"),
]


@pytest.mark.parametrize(("url", "expected"), URLS)
def test_urls_are_those_of_kombu(url: str, expected: str) -> None:
    assert broker_url(url) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", "ssl_cert_reqs=required"),
        ("?ssl_cert_reqs=none", "ssl_cert_reqs=none"),
        ("?ssl_ca_certs=/etc/ca.pem", "ssl_ca_certs=%2Fetc%2Fca.pem&ssl_cert_reqs=required"),
    ],
)
def test_tls_checks_certificates_unless_told_otherwise(query: str, expected: str) -> None:
    assert broker_url(f"rediss://host:6379/0{query}") == f"rediss://host:6379/0?{expected}"


def test_kombu_reads_the_same_place_from_a_tcp_url() -> None:
    connection = Connection(broker_url("rediss://me:p%40ss@host:6390/4"))
    assert (connection.hostname, connection.port, connection.virtual_host) == ("host", 6390, "4")
    assert (connection.userid, connection.password) == ("me", "p@ss")
    assert connection.ssl["ssl_cert_reqs"].name == "CERT_REQUIRED"


def test_a_database_in_the_query_reaches_kombu_as_redis_py_reads_it() -> None:
    assert Connection(broker_url("redis://host:6379?db=3")).virtual_host == "3"


def test_a_password_in_the_query_of_a_socket_reaches_kombu_as_redis_py_reads_it() -> None:
    assert broker_url("unix:///run/redis.sock?password=p%40ss") == "redis+socket://:p%40ss@/run/redis.sock"


def test_an_empty_url_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="EMBEDCTL_REDIS_URL"):
        broker_url("")
    with pytest.raises(SettingsError):
        make_celery(Settings())


def test_the_application_takes_and_sends_json_alone() -> None:
    conf = make_celery(Settings(redis_url="redis://localhost")).conf
    assert conf.broker_url == "redis://localhost"
    assert (conf.task_serializer, list(conf.accept_content)) == ("json", ["json"])


def test_tickets_are_acknowledged_late_and_fetched_one_for_each_slot() -> None:
    conf = make_celery(Settings(redis_url="redis://localhost")).conf
    assert conf.task_acks_late is True
    assert conf.worker_prefetch_multiplier == 1
    assert conf.task_reject_on_worker_lost is False


def test_nothing_is_stored_by_celery_itself() -> None:
    app = make_celery(Settings(redis_url="redis://localhost"))
    assert app.conf.task_ignore_result is True
    assert app.conf.result_backend is None
    assert type(app.backend).__name__ == "DisabledBackend"


def test_a_broker_that_hangs_is_noticed() -> None:
    options = make_celery(Settings(redis_url="redis://localhost")).conf.broker_transport_options
    assert options["socket_timeout"] <= 30
    assert options["socket_connect_timeout"] <= 10
    assert options["health_check_interval"] <= 30
    assert options["visibility_timeout"] == 3600
    assert "retry_on_timeout" not in options


def test_making_an_application_leaves_the_processs_current_one() -> None:
    import celery

    app = make_celery(Settings(redis_url="redis://localhost"))
    assert celery.current_app._get_current_object() is not app

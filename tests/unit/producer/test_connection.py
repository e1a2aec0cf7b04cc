"""What is shown of a Redis URL: enough to find the server, never a secret."""

from __future__ import annotations

import pytest

from embedctl.store import Connection
from embedctl.store.connection import without_password
from embedctl_config.errors import BrokerUnavailable, SettingsError
from embedctl_config.settings import Settings

SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host:6379/0",
        "rediss://user:hunter2@host",
        "redis://host:6379/0?password=hunter2",
        "rediss://host/0?ssl_password=hunter2",
        "unix:///run/redis.sock?password=hunter2&db=1",
        "unix://user:hunter2@/run/redis.sock",
        "redis://:hunter2@[::1]:6379",
        "redis://us%40er:hunter2%2F@host",
        "redis://user:x@hunter2@host",
        "redis://:x#hunter2@host:6379/0",
        "redis://:hunter2#x@host:6379/0",
        "redis://:hunter2/x@host:6379/0",
        "redis://host/0#hunter2",
        "redis://host/0?password=hunter2@x",
        "redis://host:6379/0?password=x@hunter2",
        "unix:///run/redis.sock?password=hunter2@x",
    ],
)
def test_no_form_of_a_url_shows_its_secret(url: str) -> None:
    assert SECRET not in without_password(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://user:hunter2@host:6379/2", "redis://user:***@host:6379/2"),
        ("redis://:hunter2@host:6379/2", "redis://***@host:6379/2"),
        ("redis://user@host", "redis://user@host"),
    ],
)
def test_what_is_no_secret_is_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_redis_that_is_not_there_is_named_without_its_password() -> None:
    connection = Connection(Settings(redis_url=f"unix://user:{SECRET}@/nonexistent/redis.sock"))
    with pytest.raises(BrokerUnavailable, match=r"user:\*\*\*@/nonexistent/redis\.sock can't be reached") as raised:
        connection.now_ms()
    assert SECRET not in str(raised.value)
    assert raised.value.exit_code == 69


@pytest.mark.parametrize("url", ["redis://host:hunter2/0", "redis://:hunter2/x@host:6379/0", "redis://:hunter2@[::1"])
def test_a_url_that_cannot_be_read_is_a_settings_error_without_its_secret(url: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Connection(Settings(redis_url=url))
    assert SECRET not in str(raised.value)


def test_sentinels_that_are_not_there_are_named_without_descriptions_of_objects() -> None:
    url = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/mine"
    with pytest.raises(BrokerUnavailable) as raised:
        Connection(Settings(redis_url=url)).now_ms()
    said = f"Redis at {url} can't be reached: No master found for 'mine'. Does it run, and "
    assert str(raised.value).startswith(said)


def test_no_url_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="EMBEDCTL_REDIS_URL"):
        Connection(Settings())

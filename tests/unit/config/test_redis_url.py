"""Where Redis is: passwords from files, certificates that are checked, and messages without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from embedctl_config.errors import SettingsError
from embedctl_config.loading import load_settings
from embedctl_config.redis_url import database_of, secret_url, sentinels_of, tls_options
from embedctl_config.settings import Settings

SECRET = "p@ss/w:rd?#%20 é"
QUOTED = "p%40ss%2Fw%3Ard%3F%23%2520%20%C3%A9"
CHECKED = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:6379/2", f"redis://:{QUOTED}@host:6379/2"),
        ("redis://worker@host:6379/2", f"redis://worker:{QUOTED}@host:6379/2"),
        ("rediss://worker@host?ssl_certfile=/c", f"rediss://worker:{QUOTED}@host?ssl_certfile=%2Fc"),
        ("redis://us%40er@[::1]:1", f"redis://us%40er:{QUOTED}@[::1]:1"),
        ("redis://host?username=us@er&db=3", f"redis://us%40er:{QUOTED}@host?db=3"),
        ("unix:///run/redis.sock", f"unix://:{QUOTED}@/run/redis.sock"),
        ("unix://worker@/run/redis.sock?db=3", f"unix://worker:{QUOTED}@/run/redis.sock?db=3"),
    ],
)
def test_the_password_of_a_file_becomes_that_of_the_urls_user(url: str, expected: str, password_file: str) -> None:
    made = secret_url(Settings(redis_url=url, redis_password_file=password_file))
    assert made == expected
    assert redis.ConnectionPool.from_url(made).connection_kwargs["password"] == SECRET


@pytest.mark.parametrize("url", ["redis://u:p%40@host:1/0", "redis://host?password=x"])
def test_two_passwords_are_one_too_many(url: str, password_file: str) -> None:
    assert secret_url(Settings(redis_url=url)) == url
    with pytest.raises(SettingsError, match="leave one of them out"):
        secret_url(Settings(redis_url=url, redis_password_file=password_file))


def test_a_password_file_that_is_no_use_is_named_and_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "password"
    settings = Settings(redis_url="redis://host", redis_password_file=str(file))
    with pytest.raises(SettingsError, match=rf"redis_password_file: {file} can't be read: No such file"):
        secret_url(settings)
    file.write_text("\n")
    with pytest.raises(SettingsError, match="is empty"):
        secret_url(settings)
    file.write_bytes(b"hunter2\xff")
    with pytest.raises(SettingsError, match="is not UTF-8") as raised:
        secret_url(settings)
    assert "hunter2" not in repr(raised.getrepr(showlocals=False, chain=True).reprcrash)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


def test_certificates_are_checked_unless_insecure_is_said(tmp_path: Path) -> None:
    url = "rediss://host/0"
    assert tls_options(Settings(redis_url=url)) == CHECKED
    assert tls_options(Settings(redis_url=f"{url}?ssl_cert_reqs=required&ssl_check_hostname=True")) == CHECKED
    assert tls_options(Settings(redis_url=url, insecure=True)) == {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    assert tls_options(Settings(redis_url="redis://host/0")) == {}
    assert tls_options(Settings(redis_url="unix:///run/redis.sock", insecure=True)) == {}


@pytest.mark.parametrize(
    "check", ["ssl_cert_reqs=none", "ssl_cert_reqs=CERT_NONE", "ssl_cert_reqs=optional", "ssl_check_hostname=0"]
)
def test_a_url_may_not_turn_a_check_off(check: str) -> None:
    settings = Settings(redis_url=f"rediss://host/0?{check}&password=hunter2")
    with pytest.raises(SettingsError, match=rf"redis_url: {check.partition('=')[0]}.*--insecure") as raised:
        tls_options(settings)
    assert "hunter2" not in str(raised.value)
    assert "ssl_c" not in secret_url(settings.replace(insecure=True))


def test_tls_without_tls_is_refused() -> None:
    with pytest.raises(SettingsError, match="ssl_certfile is for rediss://, and this is redis://"):
        tls_options(Settings(redis_url="redis://host/0?ssl_certfile=/c"))


def test_an_authority_of_ones_own_is_read_before_it_is_used(tmp_path: Path) -> None:
    import trustme

    file = tmp_path / "ca.pem"
    settings = Settings(redis_url="rediss://host/0?ssl_ca_certs=/other", tls_ca_file=str(file))
    with pytest.raises(SettingsError, match=rf"tls_ca_file: {file} can't be read: No such file"):
        tls_options(settings)
    file.write_text("no certificate")
    with pytest.raises(SettingsError, match=rf"tls_ca_file: {file} holds no certificates in PEM"):
        tls_options(settings)
    trustme.CA().cert_pem.write_to_path(file)
    assert tls_options(settings) == {**CHECKED, "ssl_ca_certs": str(file)}
    assert "ssl_ca_certs" not in secret_url(settings)


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("", 0),
        ("redis://host/", 0),
        ("redis://host/7", 7),
        ("redis://host/7?db=3", 3),
        ("unix:///run/redis.sock?db=3", 3),
    ],
)
def test_the_database_is_the_one_that_redis_py_takes(url: str, database: int) -> None:
    assert database_of(url) == database
    if url:
        assert redis.ConnectionPool.from_url(url).connection_kwargs.get("db", 0) == database


def test_a_database_that_is_no_number_is_refused() -> None:
    with pytest.raises(SettingsError, match="its database is not a number"):
        database_of("redis://host/abc")


@pytest.mark.parametrize(
    ("url", "instance", "addresses", "master", "database"),
    [
        ("redis+sentinel://a/mine", "redis://a/", [("a", 26379)], "mine", 0),
        ("redis+sentinel://a:1,b,[::1]:3/mine/2", "redis://a:1/2", [("a", 1), ("b", 26379), ("::1", 3)], "mine", 2),
        ("rediss+sentinel://u:p%40@a:1,b:2/mine/2", "rediss://u:p%40@a:1/2", [("a", 1), ("b", 2)], "mine", 2),
    ],
)
def test_sentinels_stand_in_the_place_of_the_host(
    url: str, instance: str, addresses: list[tuple[str, int]], master: str, database: int
) -> None:
    settings = load_settings({"EMBEDCTL_REDIS_URL": url})
    found = sentinels_of(settings)
    assert found is not None
    assert (list(found.addresses), found.master) == (addresses, master)
    assert found.options.get("ssl", False) is url.startswith("rediss")
    assert secret_url(settings) == instance
    assert database_of(url) == database


@pytest.mark.parametrize(("content", "problem"), [(None, "can't be read: No such file"), ("\n", "is empty")])
def test_an_unreadable_password_of_sentinels_is_named(tmp_path: Path, content: str | None, problem: str) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=rf"sentinel_password_file: {file} {problem}"):
        sentinels_of(Settings(redis_url="redis+sentinel://a/mine", sentinel_password_file=str(file)))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+sentinel://a:1,b:2/", "does not name the master"),
        ("redis+sentinel://u:hunter2@a:1,b:x/mine", "the address of a sentinel can't be read"),
        ("redis+sentinel://u:hunter2@a:1,,b:2/mine", "the address of a sentinel can't be read"),
    ],
)
def test_a_url_of_sentinels_that_can_not_be_read_shows_the_form(url: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as raised:
        sentinels_of(Settings(redis_url=url))
    assert "redis+sentinel://[user:password@]host[:port],host[:port],…/MASTER[/database]" in str(raised.value)
    assert "hunter2" not in str(raised.value)

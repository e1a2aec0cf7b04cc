"""Who may look at the dashboard, and what it leaves out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from celery import Celery
from tornado.ioloop import IOLoop

from embedctl.operating.dashboard.serve import allowed_users
from embedctl_config.address import Address, is_loopback
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
def test_names_of_this_machine_alone(host: str) -> None:
    assert is_loopback(host)
    assert allowed_users(Settings(flower_address=str(Address(host.strip("[]"), 5555)))) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example"])
def test_any_other_address_needs_users(host: str) -> None:
    with pytest.raises(SettingsError, match=r"^flower_address: .*EMBEDCTL_FLOWER_AUTH_FILE; or listen at 127\.0\.0\.1"):
        allowed_users(Settings(flower_address=str(Address(host, 5555))))


def test_a_file_names_users(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text("kim:pass word\n\nlee:with:colon\r\n")
    settings = Settings(flower_address="0.0.0.0:5555", flower_auth_file=str(file))
    assert allowed_users(settings) == ["kim:pass word", "lee:with:colon"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: No such file or directory"),
        ("", "names no user"),
        ("kim:pw\nonlyauser\n", "line 2: expected `user:password`"),
        ("kim:\n", "line 1: expected"),
        (":hidden\n", "line 1: expected"),
        ("kim:gehe1m-ü\n", "use ASCII characters only"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_it(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "users"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=r"^flower_auth_file: ") as raised:
        allowed_users(Settings(flower_auth_file=str(file)))
    assert message in str(raised.value)
    for secret in ("onlyauser", "hidden", "gehe1m"):
        assert secret not in str(raised.value)


class _Enough(BaseException):
    pass


def test_after_an_outage_however_long_events_are_received_again_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from embedctl.operating.dashboard import application

    waits: list[float] = []
    tries = iter([OSError("away")] * 20 + [None, OSError("away")])

    class Receiver:
        def __init__(self, *_: object, **__: object) -> None:
            if failure := next(tries, _Enough()):
                raise failure

        def capture(self, **_: object) -> None:
            waits.append(0)

    monkeypatch.setattr(application, "EventReceiver", Receiver)
    monkeypatch.setattr(time, "sleep", waits.append)
    app = Celery(broker="memory://", set_as_current=False)
    with pytest.raises(_Enough):
        application.RetryingEvents(app, IOLoop.current(), max_tasks_in_memory=10).run()
    assert waits == [0.5, 1, 2, 4] + [5] * 16 + [0] + [0.5]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0] == said[2] == "no events can be received, and pages stand still; trying again: away"
    assert said[1] == "events are received again"

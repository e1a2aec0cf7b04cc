"""Signatures of webhooks, and settings that are refused."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from embedctl_gateway.batches.webhooks import receiver_of, signature

# The example of Svix, from whose webhooks the standard was made: https://docs.svix.com/receiving/verifying-payloads/how-manual.
SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"


def test_the_signature_is_that_of_standard_webhooks() -> None:
    body = b'{"email":"test@example.com","username":"test_user"}'
    secret = base64.b64decode(SECRET.removeprefix("whsec_"))
    assert signature(secret, "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk", 1649367553, body) == (
        "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw="
    )


def given(folder: Path, url: str, secret: str | None, networks: str = "") -> Settings:
    file = folder / "secret"
    if secret is not None:
        file.write_text(secret)
    return Settings(
        gateway_webhook_url=url,
        gateway_webhook_secret_file="" if secret is None else str(file),
        gateway_webhook_networks=networks,
    )


def test_a_receiver(tmp_path: Path) -> None:
    receiver = receiver_of(given(tmp_path, "https://told.example/path?a=b", f"{SECRET}\n"))
    assert receiver is not None
    assert (receiver.url, len(receiver.secret)) == ("https://told.example/path?a=b", 24)
    assert "secret" not in repr(receiver)
    assert receiver_of(Settings()) is None
    for url in ("https://10.1.2.3/told", "http://10.1.2.3/told", "http://receiver.inside/told"):
        assert receiver_of(given(tmp_path, url, SECRET, "10.1.0.0/16"))


@pytest.mark.parametrize(
    ("url", "secret", "told"),
    [
        ("ftp://told.example/", SECRET, "gateway_webhook_url"),
        ("https://user:word@told.example/", SECRET, "without a password"),
        ("https://told.example/\nx", SECRET, "gateway_webhook_url"),
        ("https://told.example/a b", SECRET, "in ASCII"),
        ("https://tøld.example/", SECRET, "in ASCII"),
        ("HTTP://told.example/", SECRET, "write https://"),
        ("https://127.0.0.1/", SECRET, r"127\.0\.0\.1 is no public address"),
        ("https://[::ffff:169.254.169.254]/", SECRET, r"169\.254\.169\.254 is no public address"),
        ("https://told.example/", None, "name a file"),
        ("https://told.example/", "", "is empty"),
        ("https://told.example/", SECRET.removeprefix("whsec_"), "is not whsec_"),
        ("https://told.example/", "whsec_é", "is not whsec_"),
        ("https://told.example/", "whsec_c2hvcnQ=", "24 to 64 bytes"),
    ],
)
def test_what_is_wrong_is_told_without_the_secret(tmp_path: Path, url: str, secret: str | None, told: str) -> None:
    with pytest.raises(SettingsError, match=told) as refused:
        receiver_of(given(tmp_path, url, secret))
    assert "word@" not in str(refused.value)
    assert not secret or secret.removeprefix("whsec_") not in str(refused.value)

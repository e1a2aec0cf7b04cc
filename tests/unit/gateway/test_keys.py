"""The gateway's keys: made once, kept as hashes, read again as they change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from starlette.requests import Request

from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from embedctl_gateway.__main__ import main
from embedctl_gateway.access.callers import Access, Keys
from embedctl_gateway.access.key_file import PREFIX, add_key, read_keys, remove_key
from embedctl_gateway.http.refusals import Refusal

#: Runs `embedctl gateway key` with a file of keys.
Command = Callable[..., Result]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def command(path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    for name in os.environ:
        if name.startswith("EMBEDCTL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(path.parent)
    return lambda *words: CliRunner().invoke(main, ["key", *words, "--keys", str(path)])


def asking(**headers: str) -> Request:
    return Request({"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})


def test_a_key_is_shown_once_and_kept_as_a_hash(command: Command, path: Path) -> None:
    made = command("add", "alice", "--tenant", "search")
    key = made.output.strip()
    assert (made.exit_code, key.startswith(PREFIX), len(key)) == (0, True, len(PREFIX) + 43)
    assert command("add", "bob").exit_code == 0
    assert key.removeprefix(PREFIX) not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    listed = json.loads(command("list", "--json").output)
    assert [(each["name"], each["tenant"]) for each in listed] == [("alice", "search"), ("bob", "default")]
    assert command("list").output.split()[:2] == ["alice", "search"]
    assert Keys(path).tenant_of(key) == "search"
    assert command("remove", "alice").exit_code == 0
    assert Keys(path).tenant_of(key) is None
    assert not [each for each in path.parent.iterdir() if each.name.endswith(".new")]


def test_what_key_commands_refuse(command: Command, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command("add", "alice")
    for words, said in (
        (("add", "alice"), "there is a key 'alice' already"),
        (("add", "a b"), "key 'a b': use 1 to 64 characters"),
        (("add", "carol", "--tenant", "a b"), "tenant 'a b': use"),
        (("remove", "bob"), "there is no key 'bob'"),
    ):
        refused = command(*words)
        assert (refused.exit_code, said in refused.output) == (2, True), refused.output
    nameless = CliRunner().invoke(main, ["key", "list"])
    assert (nameless.exit_code, "EMBEDCTL_GATEWAY_KEYS_FILE" in nameless.output) == (2, True)
    assert [key.name for key in read_keys(path)] == ["alice"]


def test_a_file_is_refused_that_others_may_write_or_that_holds_something_else(path: Path) -> None:
    add_key(path, "alice", "search")
    whole = path.read_text()
    for text in (
        "alice search\n",
        whole.replace("sha256:", ""),
        whole + "my-secret-key\n",
        whole.replace("search", "a+b"),
        whole.replace("alice", "\x1b[31malice"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError) as refused:
            Keys(path)
        assert "my-secret-key" not in str(refused.value)
    path.write_text(whole)
    path.chmod(0o620)
    with pytest.raises(SettingsError, match="others may write"):
        Keys(path)
    with pytest.raises(SettingsError, match="can't be read: No such file"):
        Keys(path.with_name("none"))


def test_a_gateway_notices_changes_and_trusts_no_broken_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_gateway.access.callers._LOOK_S", 0.0)
    first = add_key(path, "alice", "search")
    keys = Keys(path)
    second = add_key(path, "bob", "ads")
    assert [keys.tenant_of(first), keys.tenant_of(second)] == ["search", "ads"]
    remove_key(path, "alice")
    assert [keys.tenant_of(first), keys.tenant_of(second)] == [None, "ads"]
    whole = path.read_text()
    path.write_text("broken\n")
    assert keys.tenant_of(second) is None
    path.write_text(whole)
    assert keys.tenant_of(second) == "ads"
    path.unlink()
    assert keys.tenant_of(second) is None


def test_every_request_needs_a_key_of_the_file(path: Path) -> None:
    key = add_key(path, "alice", "search")
    access = Access(Settings(gateway_address="0.0.0.0:8080", gateway_keys_file=str(path)))
    assert access.tenant_of(asking(authorization=f"Bearer {key}")) == "search"
    assert access.tenant_of(asking(authorization=f"bearer  {key} ")) == "search"
    for headers in ({}, {"authorization": key}, {"authorization": f"Bearer {key}x"}, {"authorization": "Bearer "}):
        with pytest.raises(Refusal) as refused:
            access.tenant_of(asking(**headers))
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_without_keys_only_this_machine_may_call() -> None:
    assert Access(Settings(tenant="search")).tenant_of(asking(host="localhost:8080")) == "search"
    for address in ("0.0.0.0:8080", "[::]:8080", "10.0.0.1:8080", "gateway.example:8080"):
        with pytest.raises(SettingsError, match="can be reached from other machines"):
            Access(Settings(gateway_address=address))

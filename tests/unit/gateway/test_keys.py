"""The gateway's keys: made once, for some verbs, kept as hashes, read again as they change; and guesses."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from starlette.requests import Request

from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from embedctl_gateway.__main__ import main
from embedctl_gateway.access.callers import Access, Caller, Guesses, Keys, WrongKey
from embedctl_gateway.access.key_file import PREFIX, add_key, read_keys, remove_key
from embedctl_gateway.access.verbs import METRICS

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


def tenant_of(keys: Keys, key: str) -> str | None:
    found = keys.find(key)
    return found.tenant if found else None


def asking(**headers: str) -> Request:
    return Request({"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})


def test_a_key_is_shown_once_and_kept_as_a_hash(command: Command, path: Path) -> None:
    made = command("add", "alice", "--tenant", "search", "--may", "read", "--may", "metrics")
    key = made.output.strip()
    assert (made.exit_code, key.startswith(PREFIX), len(key)) == (0, True, len(PREFIX) + 43)
    assert command("add", "bob").exit_code == 0
    assert key.removeprefix(PREFIX) not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    listed = json.loads(command("list", "--json").output)
    assert [(each["name"], each["tenant"], each["may"]) for each in listed] == [
        ("alice", "search", ["read", "metrics"]),
        ("bob", "default", ["embed", "batches", "jobs"]),
    ]
    assert re.fullmatch(r"alice +search +\S+  read, metrics", command("list").output.splitlines()[0])
    assert tenant_of(Keys(path), key) == "search"
    assert command("remove", "alice").exit_code == 0
    assert tenant_of(Keys(path), key) is None
    assert not [each for each in path.parent.iterdir() if each.name.endswith(".new")]


def test_what_key_commands_refuse(command: Command, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command("add", "alice")
    for words, said in (
        (("add", "alice"), "there is a key 'alice' already"),
        (("add", "a b"), "key 'a b': use 1 to 64 characters"),
        (("add", "carol", "--tenant", "a b"), "tenant 'a b': use"),
        (("add", "carol", "--may", "all"), "'all' is not one of 'embed', 'batches', 'jobs', 'read', 'metrics'"),
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
        whole.replace("embed,", "all,"),
        whole.replace("embed,batches,jobs", ""),
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


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def by_rename(path: Path, text: str) -> None:
    (new := path.with_name("new")).write_text(text)
    new.chmod(0o600)
    new.replace(path)


def unnoticeably(path: Path, text: str) -> None:
    """The same file, of the same size and time."""
    before = path.stat()
    path.write_text(text.ljust(before.st_size, "\n"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def as_kubernetes(path: Path, text: str) -> None:
    """The path leads through a link to a folder, and the link is replaced."""
    folder = path.with_name(f"..{secrets.token_hex(4)}")
    folder.mkdir()
    (folder / "keys").write_text(text)
    (folder / "keys").chmod(0o440)
    path.with_name("..data_tmp").symlink_to(folder.name)
    path.with_name("..data_tmp").rename(path.with_name("..data"))
    if not path.is_symlink():
        path.unlink()
        path.symlink_to("..data/keys")


@pytest.mark.parametrize("change", [in_place, by_rename, unnoticeably, as_kubernetes])
def test_a_removed_key_is_refused_within_a_second(path: Path, change: Callable[[Path, str], None]) -> None:
    first, second = add_key(path, "alice", "search"), add_key(path, "bob", "ads")
    clock = [0.0]
    keys = Keys(path, lambda: clock[0])
    assert [tenant_of(keys, first), tenant_of(keys, second)] == ["search", "ads"]
    for removed in ("alice ", "bob "):
        lines = path.read_text().splitlines(keepends=True)
        change(path, "".join(line for line in lines if not line.startswith(removed)))
        clock[0] += 0.99
        assert tenant_of(keys, first) is None
        assert tenant_of(keys, second) == (None if removed == "bob " else "ads")


def test_a_key_is_removed_where_a_link_leads(path: Path) -> None:
    """Another gateway may know the file by its own name."""
    key = add_key(path, "alice", "search")
    (link := path.with_name("link")).symlink_to(path)
    remove_key(link, "alice")
    assert (tenant_of(Keys(path), key), link.is_symlink()) == (None, True)


def break_mode(path: Path) -> None:
    path.chmod(0o620)


def test_a_bad_file_keeps_the_keys_of_before_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, clock = add_key(path, "alice", "search"), [0.0]
    keys = Keys(path, lambda: clock[0])
    whole = path.read_text()
    other = whole.replace("alice", "bob").replace("search", "ads")
    breaking: list[Callable[[Path], object]] = [
        *(partial(Path.write_text, data=whole + other[other.index("bob") : end]) for end in (-2, -40, -64, -80)),
        partial(Path.write_bytes, data=b"\xff"),
        break_mode,
        Path.unlink,
    ]
    for breaks in breaking:
        caplog.clear()
        clock[0] += 1
        breaks(path)
        assert tenant_of(keys, key) == "search"
        assert tenant_of(keys, "") is tenant_of(keys, f"{key}x") is None
        assert "the keys of before stay valid until this is mended: gateway_keys_file:" in caplog.text
        by_rename(path, whole)
        clock[0] += 1
        assert tenant_of(keys, key) == "search"
    remove_key(path, "alice")
    clock[0] += 1
    assert tenant_of(keys, key) is None


def test_every_request_needs_a_key_of_the_file(path: Path) -> None:
    key = add_key(path, "alice", "search", ["read"])
    access = Access(Settings(gateway_address="0.0.0.0:8080", gateway_keys_file=str(path)))
    for right in (f"Bearer {key}", f"bearer  {key} "):
        assert access.caller_of(asking(authorization=right)) == Caller("search", ("read",))
    for headers in ({}, {"authorization": key}, {"authorization": f"Bearer {key}x"}, {"authorization": "Bearer "}):
        with pytest.raises(WrongKey) as refused:
            access.caller_of(asking(**headers))
        assert (refused.value.status, refused.value.code, refused.value.pause_s) == (401, "invalid_api_key", 0)
    for _ in range(20):
        with pytest.raises(WrongKey) as refused:
            access.caller_of(asking(authorization="Bearer guess"))
    assert (refused.value.status, refused.value.pause_s > 0) == (401, True)
    assert access.caller_of(asking(authorization=f"Bearer {key}")).tenant == "search"


def test_without_keys_everyone_on_this_machine_may_do_everything() -> None:
    caller = Access(Settings(tenant="search")).caller_of(asking(host="localhost:8080"))
    assert caller.tenant == "search"
    caller.need(METRICS)


def test_guesses_wait_by_their_address() -> None:
    clock = [1000.0]
    guesses = Guesses(lambda: clock[0])
    pauses = [guesses.pause_s("203.0.113.1") for _ in range(100)]
    assert (pauses[:20], pauses[20:23], max(pauses)) == ([0.0] * 20, [1.0, 2.0, 3.0], 10.0)
    assert guesses.pause_s("203.0.113.2") == 0.0
    # An IPv6 client has a network of addresses, and an IPv4 client may be shown as one of IPv6.
    assert max(guesses.pause_s(f"2001:db8::{number:x}") for number in range(100)) == 10.0
    assert (guesses.pause_s("2001:db8:0:1::1"), guesses.pause_s("::ffff:203.0.113.1")) == (0.0, 10.0)
    clock[0] += 31
    assert guesses.pause_s("203.0.113.1") == 0.0
    for number in range(20_000):
        guesses.pause_s(f"10.0.{number // 256}.{number % 256}")
    assert len(guesses._paid_at) == 10_000


@pytest.mark.parametrize(("before", "is_found"), [(b"a", True), (b"a" * 8192, False)])
def test_no_more_of_a_head_is_searched_for_a_key_than_most_have(path: Path, before: bytes, *, is_found: bool) -> None:
    """Whoever sends the rest takes the time of those who wait for their turns."""
    head = b"GET / HTTP/1.1\r\nx: %b\r\nAuthorization: bearer %b\r\n\r\n" % (before, add_key(path, "a", "bob").encode())
    assert Access(Settings(gateway_keys_file=str(path))).tenant_of(head) == "bob" * is_found

"""The access list is made of what the source does, and says so where they differ."""

from __future__ import annotations

import ast
import inspect
import stat
from fnmatch import fnmatchcase
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pytest

from embedctl import store
from embedctl.operating.acl import (
    ADMIN,
    OF_ADMIN,
    SHORTEST_PASSWORD,
    USERS,
    access_list,
    read_passwords,
    script_commands,
)
from embedctl_config import keys
from embedctl_config.errors import SettingsError

JOB = "20260731-235959-0123456789"
#: Methods of redis-py that are no command of the same name; those of no command at all are empty.
METHODS = {
    "hscan_iter": "hscan",
    "zscan_iter": "zscan",
    "register_script": "evalsha script|load",
    "script_load": "script|load",
    # The administrator's alone.
    "scan": "",
    # Refused to all users, which the caller expects: it would show passwords.
    "config_get": "",
    "pipeline": "",
    "execute": "",
    "close": "",
    "from_url": "",
}
NO_KEYS = ("of_queue", "is_job_id", "created_s", "patterns_of")
#: What a function of `keys` is called with.
ARGUMENTS = {
    "job_id": JOB,
    "chunk": 17,
    "token": "0123456789abcdef",
    "key": "any key",
    "name": "cpu:0-3@host.example/0a1b2c3d",
    "queue": "embed.cpu.BAAI/bge-small-en-v1.5",
    "hardware": "cpu-int8",
    "model": "BAAI/bge-small-en-v1.5",
    "lane": "interactive",
    "tenant": "team@a.example",
    "size": "small",
    "destination": "postgresql://host/base?table=t",
}


def commands_of_the_store() -> set[str]:
    """What the store's Python asks Redis for: the methods called on a client or a pipeline."""
    found = set()
    for file in Path(inspect.getfile(store)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_client(node.func.value):
                found |= set(METHODS.get(node.func.attr, node.func.attr).split())
    return found


def _is_client(value: ast.expr) -> bool:
    """`client`, `pipe`, `self._redis`, or what a call on one of them gives."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return _is_client(value.func.value)
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return name in ("client", "pipe", "_redis")


def key_functions() -> list[str]:
    own = {
        name: each for name, each in vars(keys).items() if inspect.isfunction(each) and each.__module__ == keys.__name__
    }
    return [name for name in own if not name.startswith("_") and name not in NO_KEYS]


def allowed(user: str) -> set[str]:
    made = access_list(dict.fromkeys([*USERS, ADMIN], ("x" * 16,)), database=0)
    return set(next(line for line in made.splitlines() if line.startswith(f"user {user} ")).split())


def test_every_command_of_the_store_is_one_that_a_user_may_run() -> None:
    found = commands_of_the_store()
    assert {"hgetall", "xread", "zremrangebyscore", "evalsha"} <= found
    listed = set().union(*(user.commands for user in USERS.values()))
    assert found <= listed
    # What only the store is said to ask for is asked for.
    assert {command.removeprefix("+") for command in allowed("monitor") if command.startswith("+")} <= {*found, "ping"}


def test_every_script_is_run_by_somebody_who_may_run_it() -> None:
    shared = ("claim", "deaths", "ledger", "lists", "prelude", "repair", "rooms", "sums", "turns")
    scripts = {
        file.name.removesuffix(".lua") for file in files("embedctl.store").iterdir() if file.name.endswith(".lua")
    }
    assert OF_ADMIN.union(*(user.scripts for user in USERS.values())) == scripts - set(shared)
    for name, user in USERS.items():
        for script in user.scripts:
            assert script_commands(script)
            assert {f"+{command}" for command in script_commands(script)} <= allowed(name)


def test_every_key_matches_the_pattern_of_those_who_use_it() -> None:
    for name in key_functions():
        function = getattr(keys, name)
        key = function(*(ARGUMENTS[parameter] for parameter in inspect.signature(function).parameters))
        roles = keys.ACCESS[next(pattern for pattern in keys.ACCESS if fnmatchcase(key, pattern))]
        assert matches(key, "worker") is ("worker" in roles or name == "uncommitted_result"), name
        assert [role for role in roles if not matches(key, role)] == [], name


def matches(key: str, user: str) -> bool:
    return any(fnmatchcase(key, rule.removeprefix("~")) for rule in allowed(user) if rule.startswith("~"))


def test_the_list_is_for_one_database_and_one_version() -> None:
    passwords = dict.fromkeys([*USERS, ADMIN], ("x" * 16,))
    made, of_third = (access_list(passwords, database=database) for database in (0, 3))
    assert "&/3.celery.pidbox" in of_third
    assert of_third.count("+select ") + of_third.count("+select\n") == len(USERS)
    assert "+select" not in made
    assert "%R~" not in made
    lines = {line.split()[1]: line for line in access_list(passwords, database=0, redis_7=True).splitlines()}
    assert "~embed:jobs" in lines["producer"].split()
    assert "%R~embed:jobs" in lines["flower"].split()


def test_passwords_are_made_once_for_their_owner_alone_and_never_printed(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    passwords, made = read_passwords(folder)
    assert sorted(made) == sorted(folder / user for user in (*USERS, ADMIN))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in made} == {0o600}
    assert len({password for (password,) in passwords.values()}) == len(made)
    assert read_passwords(folder) == (passwords, [])
    made_list = access_list(passwords, database=0)
    for (password,) in passwords.values():
        assert password not in made_list
        assert f"#{sha256(password.encode()).hexdigest()}" in made_list


def test_the_password_before_is_taken_until_its_file_goes(tmp_path: Path) -> None:
    read_passwords(tmp_path)
    (tmp_path / "worker").rename(tmp_path / "worker.old")
    passwords, made = read_passwords(tmp_path)
    assert (made, len(passwords["worker"])) == ([tmp_path / "worker"], 2)
    assert access_list(passwords, database=0).count("#") == len(USERS) + 2


def test_a_password_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "worker").write_text("x" * (SHORTEST_PASSWORD - 1))
    with pytest.raises(SettingsError, match=rf"{tmp_path / 'worker'} holds fewer than 16 characters") as raised:
        read_passwords(tmp_path)
    assert "xx" not in str(raised.value)
    (tmp_path / "worker").unlink()
    (tmp_path / "worker").mkdir()
    with pytest.raises(SettingsError, match="can't be read: Is a directory"):
        read_passwords(tmp_path)

"""Redis' access list: a user for each role, with the keys and commands that it needs, and no others. Tests compare the
commands with the store's Python code and its scripts, and run everything as these users."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from embedctl.store.scripts import script_source
from embedctl_config.errors import SettingsError
from embedctl_config.keys import BINDINGS, UNACKED, UNACKED_INDEX, UNACKED_MUTEX, patterns_of
from embedctl_config.redis_url import read_password

#: Redis keeps unsalted sha256, so a guessable password can be found from its hash. Passwords made here have 43
#: characters.
SHORTEST_PASSWORD = 16
#: The suffix of a second file next to a user's file. It holds the user's old password, which stays valid.
OLD = ".old"
_CALL = re.compile(r"redis\.p?call\('(\w+)'")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class User:
    """What a user of Redis may do. Its `role` decides its keys, which it only reads if `reads_only`. `commands` are
    those outside of scripts. `others` and `channels` are patterns of Celery's keys and channels, in which `{db}` stands
    for the database's number."""

    role: str
    scripts: frozenset[str] = frozenset()
    commands: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    reads_only: bool = False


#: The commands of the store that every user needs.
_STORE = _words("exists get hgetall hscan info mget ping pttl time zcount zrangebyscore zscore")
_LOOKING = _STORE | _words("hmget zcard zrange zrevrange zscan")
_REAPING = _words("evalsha getrange hdel hget hmget hset ltrim pexpire script|load set unlink zadd zrange zrem")

# The commands of kombu's transport, from its source (kombu/transport/redis.py of 5.7) and from running it.
_CONSUMING = _words(
    """
    brpop del discard evalsha exec exists get hdel hget hset llen lpush multi pexpire psubscribe publish punsubscribe
    rpush sadd script|exists script|load set smembers srem time unwatch watch zadd zrange zrangebyscore zrem
    """
)
#: To end a read of one's own connection early.
_HEARING = _words("client|id client|unblock")
_UUID = "????????-????-????-????-????????????"
_CONSUMED = (
    *(f"{table}.{of}" for table in BINDINGS for of in ("embed.*", "celery.pidbox", "reply.celery.pidbox", "celeryev")),
    "_kombu.binding_deadlines",
    UNACKED,
    UNACKED_INDEX,
    UNACKED_MUTEX,
    f"{_UUID}.reply.celery.pidbox",
)
_CHANNELS = ("/{db}.celery.pidbox", "/{db}.celeryev/*")

#: The scripts of somebody who submits and fetches.
_SUBMITTING = _words("create add tally recount hold seal retry stop resume cancel drainer drain free let_go drop")
#: Those of files and batches.
_OF_GATEWAY = _words("make take_due take_batch step_batch cancel_batch late note_event room drop_file list")

USERS: Mapping[str, User] = {
    "producer": User(
        "producer",
        scripts=_SUBMITTING | _OF_GATEWAY | _words("renew reap audit settle"),
        commands=_LOOKING | _REAPING | {"getbit", "xread"} | _HEARING,
        others=tuple(f"{table}.embed.*" for table in BINDINGS),
    ),
    "worker": User(
        "worker",
        scripts=_words("next ring renew part complete release seal reap audit settle let_go tally recount quota"),
        commands=_STORE | _REAPING | _CONSUMING | {"expire", "zremrangebyscore"},
        others=(*_CONSUMED, "*@*.celery.pidbox"),
        channels=_CHANNELS,
    ),
    "monitor": User("monitor", commands=_LOOKING, reads_only=True),
    # The dashboard is a monitor that also consumes Celery's events.
    "flower": User(
        "monitor",
        commands=_LOOKING | _CONSUMING,
        others=(*_CONSUMED, f"celeryev.{_UUID}"),
        channels=_CHANNELS,
        reads_only=True,
    ),
}
#: The user for everything that no other user may do, such as loading a changed list. Of embedctl, only the command
#: `repair` needs it: it looks for the records among all keys.
ADMIN = "admin"
OF_ADMIN = _words("relist relist_made")


def access_list(passwords: Mapping[str, tuple[str, ...]], *, database: int, redis_7: bool = False) -> str:
    """The content of the file that Redis' setting `aclfile` names: one line per user, with hashes and no passwords.
    `passwords` holds the valid ones of each user; `database` is in the names of Celery's channels.
    Only Redis 7 knows rules that make keys read-only: in 6.2, a user's commands apply to all of its keys."""
    # Nobody can be this user, but Redis replays its append-only file as it, and older versions silently leave out each
    # script and transaction that it may not repeat: without these rights, a restart of Redis loses all jobs.
    lines = ["user default reset off ~* &* +@all"]
    for name, valid in passwords.items():
        hashes = [f"#{hashlib.sha256(password.encode()).hexdigest()}" for password in valid]
        rules = ["~*", "&*", "+@all"] if name == ADMIN else _rules(name, database, redis_7=redis_7)
        # Redis 6.2 gives a user all channels at first, even after a reset.
        lines.append(" ".join(["user", name, "reset", "resetchannels", "on", *hashes, *rules]))
    return "".join(f"{line}\n" for line in lines)


def read_passwords(folder: Path) -> tuple[dict[str, tuple[str, ...]], list[Path]]:
    """The passwords of all users, from a folder with a file for each, and the files that were made: a missing file is,
    with a random password. Raises SettingsError if a file can't be read or made, or its password is too short."""
    passwords: dict[str, tuple[str, ...]] = {}
    made = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (*USERS, ADMIN):
            file, old = folder / name, folder / f"{name}{OLD}"
            if _make(file):
                made.append(file)
            passwords[name] = (_read(file), *([_read(old)] if old.exists() else []))
    except OSError as error:
        raise SettingsError(f"--passwords {folder}: {error.filename}: {error.strerror}") from error
    return passwords, made


def script_commands(name: str) -> frozenset[str]:
    return frozenset(command.lower() for command in _CALL.findall(script_source(name)))


def _rules(name: str, database: int, *, redis_7: bool) -> Iterator[str]:
    user = USERS[name]
    own = "%R~" if redis_7 and user.reads_only else "~"
    yield from (f"{own}{pattern}" for pattern in patterns_of(user.role))
    yield from (f"~{pattern}" for pattern in user.others)
    yield from (f"&{pattern.format(db=database)}" for pattern in user.channels)
    commands = user.commands.union(*map(script_commands, user.scripts))
    if database:
        commands |= {"select"}
    yield from (f"+{command}" for command in sorted(commands))


def _make(file: Path) -> bool:
    """Make the file with a random password that only this user can read; false if the file exists already."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(f"{secrets.token_urlsafe(32)}\n")
    return True


def _read(file: Path) -> str:
    password = read_password(file, "--passwords")
    if len(password) < SHORTEST_PASSWORD:
        raise SettingsError(
            f"--passwords: {file} holds fewer than {SHORTEST_PASSWORD} characters, which could be guessed from the "
            "access list: remove the file, and a random password is made"
        )
    return password

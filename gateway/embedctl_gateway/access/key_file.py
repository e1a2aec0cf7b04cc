"""The file of the gateway's keys: names, tenants, verbs and hashes, never a key itself."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from embedctl_config import durable
from embedctl_config.durable import locked
from embedctl_config.errors import SettingsError
from embedctl_config.tenants import check_tenant
from embedctl_gateway.access.verbs import USUAL, VERBS

#: What a key begins with, so that people and scanners of secrets recognise it.
PREFIX = "embedctl-"
_HEAD = "# Keys of `embedctl gateway`: name, tenant, verbs, day, hash. Written by `embedctl gateway key`.\n"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True, slots=True)
class Key:
    """A key as the file has it: whose it is, what it is for, and its hash. A key is random enough for a plain SHA-256.
    The hash is last, so that no beginning of a line is another key."""

    name: str
    tenant: str
    verbs: tuple[str, ...]
    day: str
    hashed: str

    @property
    def line(self) -> str:
        return f"{self.name} {self.tenant} {','.join(self.verbs)} {self.day} {self.hashed}\n"


def hash_of(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def text_of(path: Path) -> str:
    """What a file of keys holds; raises SettingsError if it can't be read, or others may write to it."""
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o022:
                raise SettingsError(f"gateway_keys_file: others may write to {path}: chmod go-w {path}")
            return file.read()
    except OSError as error:
        raise SettingsError(f"gateway_keys_file: {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"gateway_keys_file: {path} is not UTF-8") from None


def keys_in(text: str, path: Path) -> list[Key]:
    """The keys in what the file at this path holds; raises SettingsError if a line is none of ours."""
    return [
        _key(line, f"{path}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]


def read_keys(path: Path) -> list[Key]:
    """The keys of a file; raises SettingsError as the two above do."""
    return keys_in(text_of(path), path)


def add_key(path: Path, name: str, tenant: str, verbs: Sequence[str] = USUAL) -> str:
    """Make a key and write its hash; returns the key, which is nowhere else. Raises SettingsError if the name, the
    tenant or a verb is wrong, there is such a key already, or the file can't be written."""
    if check_tenant(name):  # the same alphabet, for the same reason: it is a word of a line
        raise SettingsError(f"key {name!r}: use 1 to 64 characters, only letters, digits and . _ - / @")
    if wrong := check_tenant(tenant):
        raise SettingsError(wrong)
    if not verbs or not VERBS.keys() >= set(verbs):
        raise SettingsError(f"key {name!r}: what it is for is one or more of {', '.join(VERBS)}")
    key = PREFIX + secrets.token_urlsafe(32)
    with _changing(path) as keys:
        if any(each.name == name for each in keys):
            raise SettingsError(f"there is a key {name!r} already: remove it first, or take another name")
        keys.append(Key(name, tenant, tuple(dict.fromkeys(verbs)), f"{datetime.now(UTC):%Y-%m-%d}", hash_of(key)))
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a key; raises SettingsError if there is none of this name, or the file can't be written."""
    with _changing(path, must_exist=True) as keys:
        left = [each for each in keys if each.name != name]
        if len(left) == len(keys):
            raise SettingsError(f"there is no key {name!r} in {path}")
        keys[:] = left


@contextmanager
def _changing(path: Path, *, must_exist: bool = False) -> Iterator[list[Key]]:
    """The keys of a file, to be changed. Other commands wait; a gateway reads the old file or the new one, also if it
    knows the file by another link."""
    path = path.resolve()
    try:
        with locked(path.with_name(f".{path.name}.lock"), holder=f"changes {path}"):
            keys = read_keys(path) if must_exist or path.exists() else []
            yield keys
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
            durable.write(path, (_HEAD + "".join(key.line for key in keys)).encode(), mode=mode)
    except OSError as error:
        raise SettingsError(f"gateway_keys_file: {path} can't be written: {error.strerror}") from error


def _key(line: str, where: str) -> Key:
    words = line.split()
    if len(words) == 5 and not any(map(check_tenant, words[:2])):
        name, tenant, verbs, day, hashed = words
        key = Key(name, tenant, tuple(verbs.split(",")), day, hashed)
        if VERBS.keys() >= set(key.verbs) and _DAY.fullmatch(day) and _HASH.fullmatch(hashed):
            return key
    # The line is not shown: somebody may have written a key itself there.
    raise SettingsError(f"gateway_keys_file: {where} is none that `embedctl gateway key` wrote")

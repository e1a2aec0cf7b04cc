"""Kept fields: fields of a corpus that travel with their records and come out beside the vectors."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from typing import Any

from embedctl.corpus.fields import field_of, refuse_twice
from embedctl.corpus.records import NO_TEXT, kind_of
from embedctl_config.errors import InputError, SettingsError

#: Most bytes of one record's kept fields, as JSON with their names. They hold a text of 8,192 tokens, which is what
#: common models with long inputs take. A chunk's kept fields count against `chunk_bytes`, so a result stays small.
MAX_KEPT_BYTES = 64 * 1024
#: Most fields that a job keeps: each is a column of a parquet file, and its name is stored with every record.
MAX_KEPT_FIELDS = 32
#: Longest name of a kept field (bytes).
MAX_NAME_BYTES = 256
#: Deepest nesting of a kept value. Reading JSON takes stack, and every reader has to be able to do it.
MAX_DEPTH = 64
#: What output files say of a record themselves: in .jsonl, in .parquet.
OWN_NAMES = frozenset(
    ("position", "id", "embedding", "error", "truncated", "error_code", "error_message", "tokens_used", "tokens_lost")
)

#: What they say of a record too, if the job counts tokens.
TOKENS = "tokens"
#: The column with the SHA-256 of each record's text, if the job has digests.
TEXT_SHA256 = "text_sha256"
#: The kept field in which a record's digest travels, in hexadecimal. Users can't keep a field of that name.
DIGEST_FIELD = "embedctl:text_sha256"

_SURROGATES = re.compile("[\ud800-\udfff]")
#: Types of pandas that stand for a missing value, and that JSON has no other form for.
_NULLS = ("NAType", "NaTType")
#: Types whose text says it all. They are known by name, because their modules take time to import.
_WRITTEN_OUT = ("Decimal", "UUID", "datetime64")


def parse_keep(words: str | None) -> tuple[str, ...]:
    """The names in `title,url`, as the command line takes them; raises SettingsError as :func:`check_keep` does."""
    return () if words is None else check_keep([word.strip() for word in words.split(",")])


def check_keep(names: Iterable[str]) -> tuple[str, ...]:
    """The names of fields to keep, each once; raises SettingsError if they are too many or too long, or one is a name
    that output files use themselves."""
    try:
        chosen = () if isinstance(names, str) else tuple(dict.fromkeys(names))
    except TypeError:  # not iterable, or a name that is a list
        chosen = ()
    if isinstance(names, str) or (names and not chosen):
        raise SettingsError(f"keep is {names!r}, not several names: give a list of them, such as ['title']")
    if len(chosen) > MAX_KEPT_FIELDS:
        raise SettingsError(f"keep names {len(chosen)} fields, and the maximum is {MAX_KEPT_FIELDS}: leave some out")
    for name in chosen:
        _check_name(name)
    return chosen


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise SettingsError(f"keep: {name!r} is not the name of a field")
    if name == "id":
        raise SettingsError("keep: the id comes back in any case; leave id out")
    if name in OWN_NAMES:
        raise SettingsError(
            f"keep: {name!r} is a name that output files use themselves ({', '.join(sorted(OWN_NAMES))}): rename the "
            "field in the corpus, or leave it out"
        )
    if name == DIGEST_FIELD:
        raise SettingsError(f"keep: {name!r} is embedctl's own name: rename the field in the corpus")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise SettingsError(f"keep: the name {name!r} is not valid UTF-8") from None
    if size > MAX_NAME_BYTES:
        raise SettingsError(f"keep: a name has {size:,} bytes, and the maximum is {MAX_NAME_BYTES}: rename the field")


def tells_tokens(options: Mapping[str, Any]) -> bool:
    return bool(options.get("count_tokens"))


def kept_fields(item: Mapping[str, Any], names: Sequence[str], where: str) -> bytes | None:
    """A record's fields of these names as a JSON object in UTF-8; None if there are no names. A missing field is null.
    A name may be a path such as `body.title`: see :func:`field_of`.

    Numbers, truth values, null, text, lists and objects stay what they are. NaN and the infinities become null, dates
    and times text (ISO 8601), durations seconds (those of parquet text, where a number would lose digits), decimals and
    UUIDs text, bytes base64. In a text, what is not UTF-8 becomes U+FFFD.
    Raises InputError if a value has no such form, or the fields are too large.
    """
    if not names:
        return None
    values = {name: field_of(item, name) for name in names}
    refuse_twice(values, where)
    try:
        data = _as_json(values)
    except (TypeError, ValueError, RecursionError):
        raise _unfit(values, where) from None
    if len(data) > MAX_KEPT_BYTES:
        raise _too_large(values, where, len(data))
    return data


def with_members(kept: bytes | None, more: bytes) -> bytes:
    """A record's kept fields and others, both as JSON objects, as one."""
    fields = (kept or b"{}")[:-1]
    return fields + (b"," if len(fields) > 1 else b"") + more[1:]


def as_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as they travel and come out: JSON values alone."""
    plain: dict[str, Any] = json.loads(_as_json(values))
    return plain


def names_with_values(kept: bytes | None) -> set[str]:
    """The names of the fields in a record's JSON that are not null."""
    return {name for name, value in json.loads(kept or b"{}").items() if value is not None}


def _as_json(value: object) -> bytes:
    try:
        text = _ENCODER.encode(value)
    except ValueError:  # NaN or an infinity, a circle, or a whole number of thousands of digits
        text = _ENCODER.encode(_finite(value))
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(json.loads(text), MAX_DEPTH)
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Bytes of a file that are not UTF-8 were read as lone surrogates.
        return _SURROGATES.sub("\ufffd", text).encode()


def _plain(value: Any) -> object:
    """A value that JSON has no type for, as one that it has a type for."""
    name = type(value).__name__
    if name in _NULLS or value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date | time):
        return value.isoformat()
    if name in _WRITTEN_OUT:
        text = str(value)
        return None if text in ("NaN", "NaT") else text
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    if type(value).__module__ == "numpy" and name != "timedelta64":
        return value.tolist()  # of a scalar, a number
    raise TypeError


def _finite(value: object) -> object:
    """A value with null in place of NaN and of the infinities."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if value is None or isinstance(value, str | int):
        return value
    return _finite(_plain(value))


def _check_depth(value: object, left: int) -> None:
    if not left:
        raise ValueError
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_depth(part, left - 1)


def _unfit(values: Mapping[str, Any], where: str) -> InputError:
    for name, value in values.items():
        try:
            _as_json({name: value})
        except (TypeError, ValueError, RecursionError):
            return InputError(
                f"{where}: the field {name!r} can't be kept: JSON has no form for {_kind(value)}, it is "
                f"nested more than {MAX_DEPTH} deep, or a name in it stands twice. Leave it out of --keep (keep= in "
                "Python), or convert it to text"
            )
    return InputError(f"{where}: the fields {', '.join(values)} can't be kept: JSON has no form for them")


def _kind(value: object) -> str:
    said = kind_of(value)
    return f"a {type(value).__name__}" if said == NO_TEXT else said


def _too_large(values: Mapping[str, Any], where: str, size: int) -> InputError:
    largest = max(values, key=lambda name: len(_as_json(values[name])))
    return InputError(
        f"{where}: the kept fields have {size:,} bytes, and the maximum is {MAX_KEPT_BYTES:,}; the largest is "
        f"{largest!r}. Leave it out of --keep (keep= in Python), or shorten it"
    )


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)

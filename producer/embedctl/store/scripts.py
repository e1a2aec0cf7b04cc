"""The scripts that Redis runs: their text, and calls of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from embedctl_config import keys, tenants, wire

_FOLDER = files("embedctl.store")
#: The lifetimes of an ended job with at most this many chunks are shortened to its TTL at once, without the reaper.
_SETTLED_AT_ONCE = 16
#: A chunk of at most this size is small (bytes). So many times as many small chunks may be on their way: together they
#: are less work than one large chunk, and a worker may encode many of them at once.
_SMALL_BYTES, _SMALL_FACTOR = 8192, 16
#: Issued chunks that `issue` checks at once, whether their tickets are still on their way.
_CHECKED = 4
#: A ticket that is not in its queue is claimed within this time, unless it was lost or nobody may take it (seconds).
_CLAIMED_AFTER_S = 5
#: A job waits at most this much longer for a chunk's turn than the smaller jobs of its tenant and lane (seconds).
_LONGEST_WAIT_S = 60
#: While other jobs wait, the background lane has one chunk in this time (seconds).
_BACKGROUND_S = 60
#: Scripts that are not about a job, and include nothing.
_PLAIN_SCRIPTS = ("quota", "make", "take_batch", "step_batch", "cancel_batch", "note_event")
_USUAL = ("sums", "prelude")
#: Script → the parts that it includes, if these are not the usual ones.
_PARTS = {
    "create": ("sums",),
    "tally": ("sums",),
    "issue": (),
    "reap": (*_USUAL, "deaths", "rest"),
    "add": (*_USUAL, "repair"),
}


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A call of a script, for several calls in one round trip."""

    name: str
    keys: Sequence[str]
    args: Sequence[Any] = ()


def flat(facts: Mapping[str, Any]) -> list[str]:
    """Fields and values of a hash, one after the other, as scripts take them."""
    return [str(each) for pair in facts.items() for each in pair]


def script_names() -> Iterator[str]:
    """The names of all scripts, without the parts that several of them include."""
    shared = {part for parts in (_USUAL, *_PARTS.values()) for part in parts}
    names = {Path(file.name) for file in _FOLDER.iterdir()}
    return (name.stem for name in names if name.suffix == ".lua" and name.stem not in shared)


@cache
def script_source(name: str) -> str:
    """The text of a script: constants, shared parts, then the script."""
    if name in _PLAIN_SCRIPTS:
        return _text(name)
    constants = (
        f"local TENANT, JOB, QUOTA = '{tenants.DEFAULT}', '{keys.job('')}', '{keys.QUOTA}'\n"
        f"local WIRE_VERSION, CHUNK_TTL_FACTOR, UNENDED_TTL_MS, SETTLED_AT_ONCE = "
        f"{wire.VERSION}, {keys.CHUNK_TTL_FACTOR}, {keys.UNENDED_TTL_S * 1000}, {_SETTLED_AT_ONCE}\n"
        f"local EVENTS_KEPT, ENDED_EVENTS_MS, ROWS_AT, DIGEST_FROM, DIGEST_TO = "
        f"{keys.EVENTS_KEPT}, {keys.ENDED_EVENTS_S * 1000}, {wire.ROWS_AT}, {', '.join(map(str, wire.DIGEST_RANGE))}\n"
        f"local BIRTH, JOBS, WORKERS, DIED, LEFT = "
        f"'{keys.BIRTH}', '{keys.JOBS}', '{keys.WORKERS}', '{keys.died('')}', '{keys.LEFT}'\n"
        f"local KIND_AT, ELSEWHERE, SIZE_AT = {wire.KIND_AT}, {wire.ELSEWHERE}, {wire.PREFIX_BYTES}\n"
        f"local UPKEEP, LOOK_AFTER_MS = '{keys.UPKEEP}', {keys.LOOK_AFTER_S * 1000}\n"
    )
    if name == "issue":
        constants += (
            f"local ACTIVE, FLOWS, FLOW, LANE = '{keys.ACTIVE}', '{keys.FLOWS}', '{keys.FLOW}', '{tenants.NORMAL}'\n"
            f"local SMALL, SMALL_FACTOR, CHECKED, LONGEST_WAIT_S, BACKGROUND_MS, CLAIMED_AFTER_MS = "
            f"{_SMALL_BYTES}, {_SMALL_FACTOR}, {_CHECKED}, {_LONGEST_WAIT_S}, {_BACKGROUND_S * 1000}, "
            f"{_CLAIMED_AFTER_S * 1000}\n"
        )
    return constants + "".join(map(_text, (*_PARTS.get(name, _USUAL), name)))


def _text(name: str) -> str:
    return _FOLDER.joinpath(f"{name}.lua").read_text(encoding="utf-8")

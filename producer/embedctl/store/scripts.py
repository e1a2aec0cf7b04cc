"""The scripts that Redis runs: their text, and calls of them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from embedctl.store.status import COUNTS, PERHAPS_NUMBERS
from embedctl_config import keys, tenants, wire

_FOLDER = files("embedctl.store")
#: The lifetimes of an ended job with at most this many chunks are shortened to its TTL at once, without the reaper.
_SETTLED_AT_ONCE = 16
#: A chunk whose owner died waits for so long, in which a supervisor starts a worker in quarantine. If two texts of a
#: job killed workers within the longer time, only workers in quarantine are given anything of it for as long (seconds).
_SUSPECT_S, _DISTRUST_S = 2, 60
#: That ends sooner after so many chunks in a row that came through quarantine: each time twice as many, up to the most.
_TRIALS, _MOST_TRIALS = 4, 256
#: Jobs that were in hand at a death, or distrusted, are not in one worker together for so long; if several wait for a
#: worker, each has it for at least the shorter time (seconds).
_WATCH_S, _WATCHED_S = 30, 5
#: Bells that wait in a queue for each of its workers, at most: so many chunks a worker may take at once.
_BELLS_PER_WORKER = 4
#: One call gives at most so many small chunks, looks at so many jobs, and at so many chunks of a job.
_GATHERED, _STEPS, _CHUNK_LOOKS, _READY_LOOKS = 32, 100, 4000, 8
#: The facts of a job with at most so many chunks are given with its chunk, because a worker may not know it. Each claim
#: of such a job checks all of its facts. Of a larger job, every sixteenth claim does.
_SMALL_JOB, _CHECKED = 16, 16
#: Whole numbers that each job has, first those of its records that are encoded, and others that it may lack.
_NEEDED = ("done", "failed", *sorted({*COUNTS} - {"done", "failed"}), "next", "ttl_ms", "created_ms", "progressed_ms")
_NUMBERS = (*_NEEDED, *PERHAPS_NUMBERS, "work", "started_ms", "lost_first", "lost_last")
#: A lost answer is given again within this time (seconds).
_GIVEN_S = 20
#: While other jobs wait, the background lane has one chunk in this time (seconds).
_BACKGROUND_S = 60
#: Scripts of the gateway's ledger.
_OF_LEDGER = ("make", "take_batch", "step_batch", "cancel_batch", "late", "relist_made", "drop_file")
#: Scripts that are not about a job → the parts that they include.
_PLAIN_SCRIPTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("quota", "take_due", "note_event", "free"), ()),
    **dict.fromkeys(_OF_LEDGER, ("ledger",)),
    "room": ("ledger", "rooms"),
}
_USUAL = ("sums", "turns", "prelude")
#: Script → the parts that it includes, if these are not the usual ones.
_PARTS = {
    "create": ("sums", "lists", "ledger", "rooms"),
    "relist": ("lists",),
    "tally": ("sums",),
    "ring": ("turns",),
    "next": (*_USUAL, "claim"),
    "reap": (*_USUAL, "deaths"),
    "add": (*_USUAL, "repair"),
}
#: A function of a part, with the comment before it.
_FUNCTION = re.compile(r"(?:^--[^\n]*\n)*^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)


_NO_ARGUMENTS = b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
#: A Celery message that says that a queue has work, as kombu would put it into the queue's list; `$id` and `$queue` are
#: replaced. See Celery's "Message Protocol", version 2.
BELL = json.dumps(
    {
        "body": base64.b64encode(_NO_ARGUMENTS).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": keys.TASK,
            "id": "$id",
            "root_id": "$id",
            "parent_id": None,
            "group": None,
            "argsrepr": "()",
            "kwargsrepr": "{}",
            "origin": "embedctl",
            "ignore_result": True,
        },
        "properties": {
            "correlation_id": "$id",
            "reply_to": "",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "$queue"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "$id",
        },
    }
)
_TURNS = (
    f"local TENANT, LANE = '{tenants.DEFAULT}', '{tenants.NORMAL}'\n"
    f"local QUEUE_PREFIX, QUEUE_KEY = '{keys.queue('', '')[:-1]}', '{keys.QUEUE_KEY}'\n"
    f"local LANES, KINDS, FLOWS, SERVED, LEVELS, JOBS_LEFT, JOBS_WAIT, PAUSE, BELLS = "
    f"{', '.join(repr(key) for key in keys.TURNS)}\n"
    f"local KNOWN_LANES = {{{', '.join(f'{lane} = true' for lane in tenants.LANES)}}}\n"
    f"local BELLS_PER_WORKER, GATHERED, STEPS, CHUNK_LOOKS, READY_LOOKS, SMALL_JOB, CHECKED, GIVEN_MS, BACKGROUND_MS = "
    f"{_BELLS_PER_WORKER}, {_GATHERED}, {_STEPS}, {_CHUNK_LOOKS}, {_READY_LOOKS}, {_SMALL_JOB}, {_CHECKED}, "
    f"{_GIVEN_S * 1000}, {_BACKGROUND_S * 1000}\n"
    f"local NUMBERS, NEEDED = {{{', '.join(map(repr, _NUMBERS))}}}, {len(_NEEDED)}\n"
    f"local APART, SUSPECT_MS, DISTRUST_MS = 'apart:', {_SUSPECT_S * 1000}, {_DISTRUST_S * 1000}\n"
    f"local TRIALS, MOST_TRIALS = {_TRIALS}, {_MOST_TRIALS}\n"
    f"local WATCH_MS, WATCHED_MS, WATCHED = {_WATCH_S * 1000}, {_WATCHED_S * 1000}, '{keys.watched('')}'\n"
    f"local BELL = [=[{re.sub(r'[$][a-z]+', '%s', BELL)}]=]\n"
    f"local UNACKED = {{'{keys.UNACKED}', '{keys.UNACKED_INDEX}'}}\n"
)
#: What a batch says of its end if nobody could write its answers.
_TOO_LATE = [{"code": "ended_late", "message": "its answers could not be written in time", "param": None, "line": None}]
_LEDGER = (
    f"local BATCH, UNFINISHED, TURNS, DEADLINES, CLOCK = "
    f"'{keys.batch('')}', '{keys.unfinished('')}', '{keys.BATCH_TURNS}', '{keys.DEADLINES}', '{keys.CLOCK}'\n"
    f"local EVENT, UNTOLD, EVENT_MS = '{keys.webhook_event('')}', '{keys.UNTOLD}', {keys.EVENT_TTL_S * 1000}\n"
    f"local KEPT_MS, WINDOW_MS, END_MS, STEP_MS = {keys.FILE_TTL_S * 1000}, {keys.BATCH_WINDOW_S * 1000}, "
    f"{keys.BATCH_END_S * 1000}, {keys.CLOCK_STEP_S * 1000}\n"
    f"local LEDGER, LATELY_MS, RESERVE, SMALL_BYTES = '{keys.ledger('')}', {keys.LATELY_S * 1000}, "
    f"{keys.RESERVE}, {keys.SMALL_FILE_BYTES}\n"
    f"local TOO_LATE = [=[{json.dumps(_TOO_LATE)}]=]\n"
)


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
    shared = {part for parts in (_USUAL, *_PARTS.values(), *_PLAIN_SCRIPTS.values()) for part in parts}
    names = {Path(file.name) for file in _FOLDER.iterdir()}
    return (name.stem for name in names if name.suffix == ".lua" and name.stem not in shared)


@cache
def script_source(name: str) -> str:
    """The text of a script: constants, shared parts, then the script."""
    if name in _PLAIN_SCRIPTS:
        parts = _PLAIN_SCRIPTS[name]
        return (_LEDGER if parts else "") + "".join(map(_text, (*parts, name)))
    constants = (
        f"local JOB, QUOTA = '{keys.job('')}', '{keys.QUOTA}'\n"
        f"local WIRE_VERSION, CHUNK_TTL_FACTOR, UNENDED_TTL_MS, SETTLED_AT_ONCE = "
        f"{wire.VERSION}, {keys.CHUNK_TTL_FACTOR}, {keys.UNENDED_TTL_S * 1000}, {_SETTLED_AT_ONCE}\n"
        f"local EVENTS_KEPT, ENDED_EVENTS_MS, ROWS_AT = "
        f"'{keys.EVENTS_KEPT}', {keys.ENDED_EVENTS_S * 1000}, {wire.ROWS_AT}\n"
        f"local DIGEST_FROM, DIGEST_TO = {', '.join(repr(str(at)) for at in wire.DIGEST_RANGE)}\n"
        f"local BIRTH, JOBS, WORKERS, DIED, LEFT = "
        f"'{keys.BIRTH}', '{keys.JOBS}', '{keys.WORKERS}', '{keys.died('')}', '{keys.LEFT}'\n"
        f"local KIND_AT, ELSEWHERE, SIZE_AT = {wire.KIND_AT}, {wire.ELSEWHERE}, {wire.PREFIX_BYTES}\n"
        f"local ACTIVE, UPKEEP, LOOK_AFTER_MS = '{keys.ACTIVE}', '{keys.UPKEEP}', {keys.LOOK_AFTER_S * 1000}\n"
        f"local QUEUES, QUEUES_TTL_MS = '{keys.QUEUES}', {keys.QUEUES_TTL_S * 1000}\n"
    )
    parts = [_text(part) for part in _PARTS.get(name, _USUAL)]
    own = _text(name)
    if name == "next":  # It is about many jobs, so what is about one is a function of it.
        own = f"local function claim(KEYS, ARGV, found)\n{_needed(parts.pop(2), parts[2])}{parts.pop(2)}end\n{own}"
    constants += _LEDGER if "ledger" in _PARTS.get(name, ()) else ""
    return constants + _TURNS + _needed("".join(parts), own) + own


def _needed(shared: str, script: str) -> str:
    """The shared parts that a script uses. It leaves out the others, because each call makes its functions anew."""
    for function in reversed([*_FUNCTION.finditer(shared)]):
        if not re.search(rf"\b{function[1]}[(,}}]", shared[function.end() :] + script):
            shared = shared[: function.start()] + shared[function.end() :]
    return shared


def _text(name: str) -> str:
    return _FOLDER.joinpath(f"{name}.lua").read_text(encoding="utf-8")

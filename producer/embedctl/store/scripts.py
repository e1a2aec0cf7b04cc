"""The scripts that Redis runs: their text, and calls of them."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import takewhile
from textwrap import indent
from typing import Any

from embedctl.store.status import COUNTS, PERHAPS_NUMBERS
from embedctl_config import keys, tenants, wire

_FOLDER = files("embedctl.store")
#: Whole numbers that each job has, first those of its records that are encoded, and others that it may lack.
_NEEDED = ("done", "failed", *sorted({*COUNTS} - {"done", "failed"}), "next", "ttl_ms", "created_ms", "progressed_ms")
_NUMBERS = (*_NEEDED, *PERHAPS_NUMBERS, "work", "owed", "started_ms", "lost_first", "lost_last")
#: Jobs that have begun, or whose size is known, have so much of what their tenant may keep; the rest is for new ones.
KEPT_PART = 0.9
#: Scripts of the gateway's ledger.
_OF_LEDGER = ("make", "take_batch", "step_batch", "cancel_batch", "late", "relist_made", "drop_file")
#: Scripts that are not about a job → the parts that they include.
_PLAIN_SCRIPTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("quota", "take_due", "note_event", "let_go", "list"), ()),
    **dict.fromkeys(_OF_LEDGER, ("ledger",)),
    "room": ("ledger", "rooms"),
}
_USUAL = ("sums", "turns", "prelude")
#: Script → the parts that it includes, if these are not the usual ones.
_PARTS = {
    "create": ("sums", "lists", "ledger", "rooms"),
    "relist": ("lists",),
    "tally": ("sums",),
    "recount": ("sums",),
    "ring": ("turns",),
    "next": (*_USUAL, "claim"),
    "reap": (*_USUAL, "deaths"),
    "add": (*_USUAL, "repair"),
}
#: A function of a part, with the comment before it.
_FUNCTION = re.compile(
    r"(?P<head>(?:^--[^\n]*\n)*^local function (?P<name>\w+)\((?P<parameters>[^)]*)\)\n)(?P<body>.*?^end\n)",
    re.MULTILINE | re.DOTALL,
)
#: A variable of a part, alone in its line, and one that is the name of a key.
_LOCAL = re.compile(r"^local (\w+) = .*\n", re.MULTILINE)
_KEY = re.compile(r"^local (\w+) = (job \.\. '[:\w]+')\n", re.MULTILINE)
#: A comment or a string, or else the name of a constant.
_NAME = re.compile(r"--[^\n]*|'(?:[^'\\]|\\.)*'|\b([A-Z][A-Z_]+)\b")
#: A name, and a name that is called or given to a call; not a field, and not the begin of a string.
_WORD, _CALLED = re.compile(r"(?<![.\w'])\w+"), re.compile(r"(?<![.\w'])(\w+)[(,)}]")
#: A comment or a string, or else a name that is no field.
_OUTSIDE = re.compile(r"--[^\n]*|'(?:[^'\\]|\\.)*'|(?<![.:\w])(\w+)\b(?! =)")
#: A field of a job that a script uses.
_FACT = re.compile(r"\bfacts\.(\w+)")


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
#: Name in the scripts → its value. It is put in for the name: a local of each call, and of each function that uses it,
#: would cost Redis more.
CONSTANTS: Mapping[str, Any] = {
    "JOB": keys.job(""),
    "QUOTA": keys.QUOTA,
    "QUOTAS": keys.QUOTAS,
    "KEPT_BY": keys.kept(""),
    # A gateway's job, and each of its chunks, count as at least so much of what its tenant keeps: about what Redis
    # keeps beside their bytes. Larger facts of a durable part may be refused.
    "KEPT_JOB": 4096,
    "KEPT_CHUNK": 512,
    "KEPT_PART": KEPT_PART,
    "SMALL_FACTS": 4096,
    "WIRE_VERSION": wire.VERSION,
    "CHUNK_TTL_FACTOR": keys.CHUNK_TTL_FACTOR,
    "UNENDED_TTL_MS": keys.UNENDED_TTL_S * 1000,
    "UNBEGUN_TTL_MS": keys.UNBEGUN_TTL_S * 1000,
    # The lifetimes of an ended job with at most this many chunks are shortened to its TTL at once, without the reaper.
    "SETTLED_AT_ONCE": 16,
    "EVENTS_KEPT": str(keys.EVENTS_KEPT),
    "ENDED_EVENTS_MS": keys.ENDED_EVENTS_S * 1000,
    "ROWS_AT": wire.ROWS_AT,
    "DIGEST_FROM": str(wire.DIGEST_RANGE[0]),
    "DIGEST_TO": str(wire.DIGEST_RANGE[1]),
    "BIRTH": keys.BIRTH,
    "JOBS": keys.JOBS,
    "WORKERS": keys.WORKERS,
    "DIED": keys.died(""),
    "LEFT": keys.LEFT,
    "KIND_AT": wire.KIND_AT,
    "ELSEWHERE": wire.ELSEWHERE,
    "SIZE_AT": wire.PREFIX_BYTES,
    "ACTIVE": keys.ACTIVE,
    "UPKEEP": keys.UPKEEP,
    "LOOK_AFTER_MS": keys.LOOK_AFTER_S * 1000,
    "QUEUES": keys.QUEUES,
    "QUEUES_TTL_MS": keys.QUEUES_TTL_S * 1000,
    "TENANT": tenants.DEFAULT,
    "LANE": tenants.NORMAL,
    "KNOWN_LANES": dict.fromkeys(tenants.LANES, True),
    "QUEUE_PREFIX": keys.queue("", "")[:-1],
    "QUEUE_KEY": keys.QUEUE_KEY,
    **dict(
        zip(
            ("LANES", "KINDS", "FLOWS", "SERVED", "LEVELS", "JOBS_LEFT", "JOBS_WAIT", "PAUSE", "BELLS"),
            keys.TURNS,
            strict=True,
        )
    ),
    # Bells that wait in a queue for each of its workers, at most: so many chunks a worker may take at once.
    "BELLS_PER_WORKER": 4,
    # One call gives at most so many small chunks, looks at so many jobs, and at so many chunks of a job.
    "GATHERED": 32,
    "STEPS": 100,
    "CHUNK_LOOKS": 4000,
    "READY_LOOKS": 8,
    # It lists at most so many jobs of a tenant elsewhere before the next tenant has its turn.
    "MOVED": 8,
    # An estimate of work that was wrong by less than this part of a chunk is set right with the job's next chunk.
    "OWED": 4,
    # The facts of a job with at most so many chunks are given with its chunk, because a worker may not know it. Each
    # claim of such a job checks all of its facts. Of a larger job, every sixteenth claim does.
    "SMALL_JOB": 16,
    "CHECKED": 16,
    # A lost answer is given again within this time.
    "GIVEN_MS": "20000",
    # While other jobs wait, the background lane has one chunk in this time.
    "BACKGROUND_MS": 60_000,
    "NUMBERS": _NUMBERS,
    "NEEDED": len(_NEEDED),
    "APART": "apart:",
    # A chunk whose owner died waits for so long, in which a supervisor starts a worker in quarantine. If two texts of a
    # job killed workers within the longer time, only workers in quarantine are given anything of it for as long.
    "SUSPECT_MS": 2_000,
    "DISTRUST_MS": 60_000,
    # That ends sooner after so many chunks in a row that came through quarantine: each time twice as many, up to the
    # most.
    "TRIALS": 4,
    "MOST_TRIALS": 256,
    # Jobs that were in hand at a death, or distrusted, are not in one worker together for so long; if several wait for
    # a worker, each has it for at least the shorter time.
    "WATCH_MS": 30_000,
    "WATCHED_MS": 5_000,
    "WATCHED": keys.watched(""),
    "FAULTS": keys.faults(""),
    # What deaths say of a tenant is forgotten when nothing was added to it for so long.
    "FAULTS_MS": 600_000,
    "BELL": re.sub(r"[$][a-z]+", "%s", BELL),
    "UNACKED": (keys.UNACKED, keys.UNACKED_INDEX),
    "BATCH": keys.batch(""),
    "UNFINISHED": keys.unfinished(""),
    "TURNS": keys.BATCH_TURNS,
    "DEADLINES": keys.DEADLINES,
    "CLOCK": keys.CLOCK,
    "EVENT": keys.webhook_event(""),
    "UNTOLD": keys.UNTOLD,
    "EVENT_MS": keys.EVENT_TTL_S * 1000,
    "KEPT_MS": keys.FILE_TTL_S * 1000,
    "WINDOW_MS": keys.BATCH_WINDOW_S * 1000,
    "END_MS": keys.BATCH_END_S * 1000,
    "STEP_MS": keys.CLOCK_STEP_S * 1000,
    "LEDGER": keys.ledger(""),
    "FILE": keys.file(""),
    "FILES": keys.files(""),
    "LATELY_MS": keys.LATELY_S * 1000,
    "RESERVE": keys.RESERVE,
    "SMALL_BYTES": keys.SMALL_FILE_BYTES,
    # What a batch says of its end if nobody could write its answers.
    "TOO_LATE": json.dumps(
        [{"code": "ended_late", "message": "its answers could not be written in time", "param": None, "line": None}]
    ),
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


@cache
def script_source(name: str) -> str:
    """The text of a script, as Redis is given it."""
    return with_constants(script_text(name), CONSTANTS)


def script_text(name: str, text_of: Callable[[str], str] | None = None) -> str:
    """The text of a script with the names of constants: shared parts, then the script.

    Args:
        text_of: gives the text of a part or script; by default, that of its file.
    """
    text_of = text_of or file_text
    if name in _PLAIN_SCRIPTS:
        return "".join(map(text_of, (*_PLAIN_SCRIPTS[name], name)))
    parts, own = [text_of(part) for part in _PARTS.get(name, _USUAL)], text_of(name)
    if name == "next":  # It is about many jobs, so what is about one is a function of it.
        claim = indent(_needed("".join(parts[2:])), " ")
        parts, own = parts[:2], f"local function claim(KEYS, ARGV, found)\n{claim}end\n{own}"
    return _with_facts(_needed("".join([*parts, own])))


def with_constants(text: str, constants: Mapping[str, Any]) -> str:
    """A text of a script with the values of these constants in place of their names."""

    def value(found: re.Match[str]) -> str:
        return _in_lua(constants[found[1]]) if found[1] in constants else found[0]

    return _NAME.sub(value, text)


def _in_lua(value: Any) -> str:
    if isinstance(value, str):
        return f"[=[{value}]=]" if "'" in value or '"' in value else f"'{value}'"
    if isinstance(value, Mapping):
        return f"({{{', '.join(f'{name} = {str(of).lower()}' for name, of in value.items())}}})"
    return f"({{{', '.join(map(_in_lua, value))}}})" if isinstance(value, Sequence) else str(value)


def _with_facts(text: str) -> str:
    """Let a script read the fields of a job that it uses, and no others."""
    names = sorted({*_FACT.findall(text)})
    asked = ", ".join(f"'{name}'" for name in names)
    known = ", ".join(f"{name} = found[{at}]" for at, name in enumerate(names, 1))
    return text.replace("$asked", asked).replace("$known", known)


def _needed(text: str) -> str:
    """A script with the functions that it uses, each inside the one that all of its calls come from.

    Redis makes the outermost functions of a script at each call, and that costs as much as some commands do.
    """
    functions = {each["name"]: each for each in _FUNCTION.finditer(text)}
    script, names = _FUNCTION.sub("", text), [*functions]
    around: dict[str, list[str]] = {}
    called, by_script = {name: _called(functions[name][0]) for name in names}, _called(script)
    for name in reversed(names):
        users = [[*around[each], each] for each in around if name in called[each]]
        if users or name in by_script:
            shared = takewhile(lambda same: len({*same}) == 1, zip(*users, strict=False))
            around[name] = [] if name in by_script else [same[0] for same in shared]
            while any(_hides(functions[each], functions[name]) for each in around[name]):
                around[name].pop()

    def made(name: str) -> str:
        inner = "".join(made(each) for each in names if around.get(each) == [*around[name], name])
        return functions[name]["head"] + indent(inner, " ") + functions[name]["body"]

    made_text = _FUNCTION.sub(lambda found: made(found["name"]) if around.get(found["name"]) == [] else "", text)
    keys_of_job = dict(_KEY.findall(made_text))
    made_text = _OUTSIDE.sub(lambda found: keys_of_job.get(found[1], found[0]), _KEY.sub("", made_text))
    uses = Counter(_WORD.findall(made_text))
    return _LOCAL.sub(lambda found: found[0] if uses[found[1]] > 1 else "", made_text)


def _called(text: str) -> set[str]:
    """The names that are called, or given to a call."""
    return {*_CALLED.findall(text)}


def _hides(outer: re.Match[str], inner: re.Match[str]) -> bool:
    """Whether a parameter of one function has the name of the other one, or of something that this uses."""
    names = {*outer["parameters"].split(", ")} - {*inner["parameters"].split(", "), ""}
    return not names.isdisjoint(_WORD.findall(inner[0]))


def read_all() -> None:
    """Read every script now: later, a process may have no file descriptor left to read one."""
    for file in _FOLDER.iterdir():
        if file.name.endswith(".lua"):
            file_text(file.name.removesuffix(".lua"))


@cache
def file_text(name: str) -> str:
    """The text of a file of scripts."""
    return _FOLDER.joinpath(f"{name}.lua").read_text(encoding="utf-8")

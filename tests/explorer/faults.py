"""Faults of the protocol, most of which it once had: a few lines of today's scripts and client code, replaced.

They show that the explorer finds such faults. Each replaced text must occur exactly once in what it is a part of.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from unittest.mock import patch

from embedctl.reaper import Reaper
from embedctl.store.agenda import Agenda
from embedctl.store.connection import script_source
from embedctl.submission import Submission
from embedctl.waiting import Waiter


@dataclass(frozen=True)
class InScript:
    """A replacement in a file of the store's scripts; scripts that share the file have it too."""

    file: str
    before: str
    after: str

    def applied(self, source: str) -> str:
        """The text of a script with this fault."""
        text = files("embedctl.store").joinpath(f"{self.file}.lua").read_text(encoding="utf-8")
        return source.replace(text, _replaced(text, self.before, self.after))


@dataclass(frozen=True)
class InMethod:
    """A replacement in a method of the client code."""

    owner: type
    name: str
    before: str
    after: str

    def method(self) -> Callable[..., Any]:
        """The method with this fault, in its module."""
        sound = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(sound))
        text = _replaced(source, self.before, self.after)
        code = compile(text, f"<faulty {self.name}>", "exec", flags=__future__.annotations.compiler_flag)
        made: dict[str, Any] = {}
        exec(code, sound.__globals__, made)  # its text is ours
        faulty: Callable[..., Any] = made[self.name]
        return faulty


def _replaced(text: str, before: str, after: str) -> str:
    assert text.count(before) == 1, f"occurs {text.count(before)} times: {before}"
    return text.replace(before, after)


#: The parts of a fault.
Fault = tuple[InScript | InMethod, ...]


def scripts_with(fault: Fault) -> Callable[[str], str]:
    """The text of each script by its name."""

    def source(name: str) -> str:
        text = script_source(name)
        for part in fault:
            if isinstance(part, InScript):
                text = part.applied(text)
        return text

    return source


@contextmanager
def in_client_code(fault: Fault) -> Iterator[None]:
    """Within the block, the client code has this fault."""
    with ExitStack() as stack:
        for part in fault:
            if isinstance(part, InMethod):
                stack.enter_context(patch.object(part.owner, part.name, part.method()))
        yield


_SCRIPTS_SCHEDULE_NOTHING = InScript(
    "prelude", "if redis.call('ZADD', UPKEEP, 'LT', at", "if false and redis.call('ZADD', UPKEEP, 'LT', at"
)

FAULTS: dict[str, Fault] = {
    "sealing revives a job that its budget ended": (
        InScript("seal", "if ended and not sealed then return {'stopped'} end\n", ""),
    ),
    "a producer waits for room in a cancelled job": (
        InScript("cancel", "'ended_ms', now, 'waiting_bytes', 0)", "'ended_ms', now)"),
        InMethod(Submission, "_check_goes_on", "refuse_cancelled(status)", "pass"),
    ),
    "a producer waits for room in a job that its budget ended": (
        InScript("prelude", "'stopped_by', by, 'waiting_bytes', 0)", "'stopped_by', by)"),
        InMethod(Submission, "_check_goes_on", "if status.stopped_by is not None:", "if False:"),
    ),
    "nobody closes a retry that died": (
        InMethod(Reaper, "_look_at", "[job for job in jobs if job.abandoned]", "[]"),
    ),
    "a result is taken for another text": (
        InScript("complete", "(text ~= made_of and text ~= '' and made_of ~= '')", "false"),
    ),
    "a result is counted twice": (
        InScript("complete", "  or redis.call('GETBIT', counted, chunk) == 1 or", "  or"),
    ),
    "nobody notices that the seal is lost": (
        InMethod(
            Waiter, "_check_prospects", "status.original_chunks is not None or status.state is not", "True or status is"
        ),
    ),
    "nobody tells who waits that the producer died": (
        InMethod(Waiter, "_check_stalled", "if now - self._stalled_since <= keys.PRODUCER_LEASE_S:", "if True:"),
    ),
    "an audit issues the chunks of an ended job": (
        InScript("audit", "if ended then return {'ok', 0, 0, 0} end", ""),
    ),
    "no script schedules a look": (_SCRIPTS_SCHEDULE_NOTHING,),
    "nobody looks after a job": (
        _SCRIPTS_SCHEDULE_NOTHING,
        InMethod(Agenda, "_put", "if not late and not missing:", "if True:"),
    ),
}  # fmt: skip

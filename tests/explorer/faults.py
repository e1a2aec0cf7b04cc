"""Faults of the protocol, most of which it once had: a few lines of today's scripts and client code, replaced.

They show that the explorer finds such faults. Each replaced text must occur exactly once in what it is a part of.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from embedctl.queueing.reaper import Reaper
from embedctl.store.agenda import Agenda
from embedctl.store.scripts import CONSTANTS, file_text, script_text, with_constants
from embedctl.waiting.waiter import Waiter
from tests.explorer.snapshots import LONG_S


@dataclass(frozen=True)
class InScript:
    """A replacement in a file of the store's scripts; scripts that share the file have it too."""

    file: str
    before: str
    after: str


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


@dataclass(frozen=True)
class Fault:
    """A fault, and the world in which the explorer finds that it violates an invariant.

    Attributes:
        left: what may go wrong there, if less is enough; else all that the scenario has.
        without: who is not needed.
    """

    scenario: str
    invariant: str
    parts: tuple[InScript | InMethod, ...]
    left: Mapping[str, int] | None = None
    without: tuple[str, ...] = ()


#: How long suspects rest after a death, jobs are distrusted and watched, and a watched one may have a worker: in the
#: explored world, until a step ends that.
_PAUSES = dict.fromkeys(("SUSPECT_MS", "DISTRUST_MS", "WATCH_MS", "WATCHED_MS"), int(LONG_S * 1000))


def scripts_with(fault: Fault | None) -> Callable[[str], str]:
    """The text of each script by its name."""

    def text_of(file: str) -> str:
        text = file_text(file)
        for part in fault.parts if fault else ():
            if isinstance(part, InScript) and part.file == file:
                text = _replaced(text, part.before, part.after)
        return text

    def source(name: str) -> str:
        return with_constants(script_text(name, text_of), {**CONSTANTS, **_PAUSES})

    return source


@contextmanager
def in_client_code(fault: Fault | None) -> Iterator[None]:
    """Within the block, the client code has this fault."""
    with ExitStack() as stack:
        for part in fault.parts if fault else ():
            if isinstance(part, InMethod):
                stack.enter_context(patch.object(part.owner, part.name, part.method()))
        yield


_SCRIPTS_SCHEDULE_NOTHING = InScript(
    "prelude", "if redis.call('ZADD', UPKEEP, 'LT', string", "if false and redis.call('ZADD', UPKEEP, 'LT', string"
)
_IN_VAIN = "nobody waits for what cannot come"

FAULTS: dict[str, Fault] = {
    "sealing revives a job that its budget ended": Fault(
        "budget",
        "a stopped job has failed",
        (InScript("seal", "if ended and not sealed then return {'stopped'} end\n", ""),),
    ),
    "nobody closes a retry that died": Fault(
        "retry",
        "a job that has all its records ends",
        (InMethod(Reaper, "_look_at", "[job for job in jobs if job.abandoned]", "[]"),),
    ),
    "a result is taken for another text": Fault(
        "changed corpus",
        "a result is of the text that the job holds",
        (InScript("complete", "(text ~= made_of and text ~= '' and made_of ~= '')", "false"),),
    ),
    "nobody notices that the seal is lost": Fault(
        "lost seal",
        _IN_VAIN,
        (
            InMethod(
                Waiter,
                "_check_prospects",
                "status.original_chunks is not None or status.state is not",
                "True or status is",
            ),
        ),
    ),
    "nobody tells who waits that the producer died": Fault(
        "death of a producer",
        _IN_VAIN,
        (InMethod(Waiter, "_check_stalled", "if now - self._stalled_since <= keys.PRODUCER_LEASE_S:", "if True:"),),
    ),
    "an audit offers the chunks of an ended job": Fault(
        "budget and audit",
        "an ended job has no bookkeeping of its chunks",
        (InScript("audit", "if ended then return {'ok', 0, 0, 0} end", ""),),
        without=("canceller",),
    ),
    "a chunk that is put back stays leased": Fault(
        "leases",
        "a chunk is leased, ready or suspect",
        (InScript("prelude", "  redis.call('HDEL', owners, chunk)\n  if claims", "  if claims"),),
    ),
    "a job with chunks is not listed": Fault(
        "budget",
        "a job that has all its records ends",
        (InScript("prelude", "  if as_usual then list(place, ARGV[1], place.left, since or now) end\n", ""),),
    ),
    "what killed a worker is given to the next one": Fault(
        "quarantine",
        "suspects are for quarantine",
        (InScript("next", "(alike or has_quarantine(queue)) and 'usual'", "alike and 'usual'"),),
        left={"death": 1, "lapse": 1},
    ),
    "one worker has two watched jobs": Fault(
        "watched",
        "watched jobs are not in one worker together",
        (InScript("claim", "if other and (not is_same or is_over)", "if other and is_over"),),
    ),
    "what killed a worker is given to nobody": Fault(
        "quarantine",
        "a job that has all its records ends",
        (InScript("prelude", "if has_suspects or (place.is_ready and", "if (place.is_ready and"),),
        left={"death": 1, "lapse": 1},
    ),
    "nobody rings for what waits": Fault(
        "bells",
        "a job that has all its records ends",
        (InScript("turns", "local heard = BELLS_PER_WORKER *", "local heard = 0 *"),),
    ),
    "vectors of another model are taken": Fault(
        "other models and rollback",
        "the vectors of a job are those of one model",
        (InScript("complete", "pinned and pinned ~= ARGV[3]", "false"),),
        left={"rollback": 1},
    ),
    "a tenant gets back the work that it had": Fault(
        "turns",
        "a tenant's virtual time never goes back",
        (InScript("complete", "ARGV[8] - (estimated or 0)", "0 - ARGV[8] - (estimated or 0)"),),
    ),
    "nobody names lists again whose names Redis lost": Fault(
        "turns and losses",
        "who has ended takes no turns",
        (InScript("ring", "== 1 then name_lists(place) end", "== 2 then name_lists(place) end"),),
        left={"lost turns": 1},
        without=("canceller",),
    ),
    # If no script schedules a look, that alone does no harm: the sweep mends it.
    "nobody looks after a job": Fault(
        "retry",
        "what is active is looked after",
        (_SCRIPTS_SCHEDULE_NOTHING, InMethod(Agenda, "_put", "if not late and not missing:", "if True:")),
    ),
}

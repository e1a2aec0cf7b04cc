"""Real client code, one round trip at a time.

At every step, code that talks to Redis runs again from its beginning and gets the same answers as before. Its next
question is asked for real, and at the one after that it stops. So any function becomes a machine whose state is the
list of its answers. That state can be kept, compared and returned to. The code must depend only on those answers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.store.agenda import Agenda
from embedctl.store.connection import Connection
from embedctl.store.reading import Event
from embedctl.store.scripts import ScriptCall
from embedctl.store.upkeep import ActiveJob, Upkeep
from embedctl_config.errors import EmbedctlError
from tests.explorer.snapshots import lies_in_the_past


class Paused(BaseException):
    """Raised when code reaches its next round trip."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a round trip. `key` is the part that decides what the code does."""

    name: str
    key: Any
    value: Any
    error: EmbedctlError | None = None


Log = tuple[Answer, ...]

#: Questions that change nothing. A loop that only asks these and waits is back at its beginning.
_LOOKS = frozenset({"status", "has_result", "result", "retried_as", "input", "clock"})
_TELLING = frozenset({"claims", "lapsed", "refused", "deaths", "tokens", "mismatch", "trouble", "pinned_by", "options"})


def frozen(value: Any) -> Any:
    """A hashable form of a value, without times and purely informative fields."""
    if isinstance(value, JobStatus):
        told = [getattr(value, each.name) for each in dataclasses.fields(value) if each.name not in _TELLING]
        return (value.progressed_at.year > 2000, *(each for each in told if not isinstance(each, datetime | timedelta)))
    if isinstance(value, ActiveJob):
        told = [getattr(value, each.name) for each in dataclasses.fields(value) if not each.name.endswith("_ms")]
        return (value.progressed_ms > 1, *told)
    if isinstance(value, list | tuple | set):
        return tuple(map(frozen, value))
    if isinstance(value, float):  # the time of a chunk
        return lies_in_the_past(value)
    return value


class Recorder:
    """Replays answers, asks one more question, and stops the code at the next."""

    def __init__(self) -> None:
        self.begin((), "")

    def begin(
        self,
        log: Log,
        token: str,
        *,
        sees: Callable[[JobStatus], Any] = lambda status: frozen(status),
        lose: bool = False,
        follow: bool = False,
        clock: float = 0.0,
    ) -> None:
        """
        Args:
            sees: the part of a job's status that still matters once the next question is known.
            lose: ask the next question, but lose its answer on the way.
            follow: keep the earlier answers of a waiting loop, which are otherwise forgotten.
        """
        self._sees = sees
        self.next: Any = ()
        self.log, self.token, self.clock = list(log), token, clock
        self.asked = self.polled = False
        self.last = ""
        self._at, self._lose, self._follow = 0, lose, follow

    def call(self, name: str, ask: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._at < len(self.log):
            return self._again(name)
        if self.asked:
            self.next = (name, *(each for each in args if isinstance(each, int | str | bytes)))
            raise Paused
        self.asked = True
        shown = ", ".join(str(arg) for arg in args[1:] if isinstance(arg, int | str) and not isinstance(arg, bool))
        try:
            value, error = ask(*args, **named), None
        except EmbedctlError as raised:
            value, error = None, raised
        self.last = f"{name}({shown}) → {_shown(value) if error is None else type(error).__name__}"
        if self._lose:
            self.last += ", and the answer is lost"
            self.next = (name, "again")
            raise Paused
        key = self._sees(value) if isinstance(value, JobStatus) else frozen(value)
        self._note(name, (key, type(error).__name__ if error else ""), value, error)
        if error is not None:
            raise error
        return value

    def instant(self, name: str, value: Any) -> Any:
        """A value that does not come from Redis but is remembered all the same."""
        if self._at < len(self.log):
            return self._again(name)
        self._note(name, value, value, None)
        return value

    def poll(self, name: str, value: Any) -> Any:
        if self._at < len(self.log) or self.asked:
            return self.call(name, lambda: value)
        self.asked = self.polled = True
        self.last = name
        if self._follow:
            self._note(name, value, value, None)
            return value
        if name == "sleep" and self.log:
            while self.log.pop().name == "clock":
                pass
        while self.log and self.log[-1].name in _LOOKS:
            self.log.pop()
        if self.log and self.log[-1].name == "correct":  # a wait within limits: it begins with what was refused
            del self.log[-2:]
        raise Paused

    def _again(self, name: str) -> Any:
        answer = self.log[self._at]
        assert answer.name == name, f"asked {name} where it was {answer.name} before: not its answers alone decide"
        self._at += 1
        if answer.error is not None:
            raise answer.error.with_traceback(None)
        return answer.value

    def _note(self, name: str, key: Any, value: Any, error: EmbedctlError | None) -> None:
        self.log.append(Answer(name, key, value, error))
        self._at = len(self.log)


def _shown(value: Any) -> str:
    if isinstance(value, JobStatus):
        return f"{value.state} {value.done}+{value.failed}/{value.records}"
    if isinstance(value, ActiveJob):
        return f"{value.state}, {value.chunks} chunks" + ", abandoned" * value.abandoned
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)


class _Stepped:
    """A part of the store whose every method is one step."""

    def __init__(self, real: Any, recorder: Recorder) -> None:
        self._real, self._recorder = real, recorder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if found is None or isinstance(found, int | float | str | bytes | tuple):
            return found
        if not callable(found):
            return _Stepped(found, self._recorder)

        def step(*args: Any, **named: Any) -> Any:
            return self._recorder.call(name, found, *args, **named)

        return step


class _SteppedJobs(_Stepped):
    def events(self, job_id: str, after: str, timeout_s: float) -> list[Event]:
        self._recorder.poll("events", after)
        return []


class _SteppedDrains(_Stepped):
    def chunks(self, job_id: str, count: int, *, drained: bool) -> Any:
        """A look at a small bitmap is one step."""
        return self._recorder.call("chunks", lambda *_: list(self._real.chunks(job_id, count, drained=drained)), job_id)


class _SteppedUpkeep(_Stepped):
    def __init__(self, real: Any, recorder: Recorder, broker: Broker) -> None:
        super().__init__(real, recorder)
        self.agenda = _stepped_agenda(real.agenda, recorder, broker)
        self._looking = Upkeep(_SteppedScripts(broker.connection, recorder), broker.settings)

    def look(self, *args: Any, **named: Any) -> Any:
        """Look as :class:`_SteppedScripts` does: others may come between any two scripts, although they share one
        round trip."""
        return self._looking.look(*args, **named)

    def extend(self, *args: Any, **named: Any) -> None:
        """Lifetimes are not explored."""


class _SteppedScripts(Connection):
    """Runs each of several scripts as one step."""

    def __init__(self, real: Connection, recorder: Recorder) -> None:
        self._real, self._recorder = real, recorder

    def scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        return [self._recorder.call(call.name, partial(self._run, call), call.args[0]) for call in calls]

    def _run(self, call: ScriptCall, job_id: str) -> Any:
        return self._real.scripts([call])[0]


def _stepped_agenda(real: Agenda, recorder: Recorder, broker: Broker) -> Agenda:
    """An agenda that makes each round trip one step, including the round trips of its sweep."""
    agenda = Agenda(broker.connection, broker.settings)

    def step(name: str, *args: Any, **named: Any) -> Any:
        if name in ("leave_out", "forget") and not args[0]:
            return None  # nothing is asked
        return recorder.call(name.strip("_"), getattr(real, name), *args, **named)

    for name in ("due", "look_at", "leave_out", "forget", "_slice", "_facts_of", "_put"):
        setattr(agenda, name, partial(step, name))
    return agenda


class _NobodyAsks:
    """The registry of workers, as far as client code asks it. No decision of the protocol depends on it."""

    def count(self, queue: str) -> int:
        return 1

    def serving(self, hardware: str, model: str, **_: object) -> int:
        return 1

    def is_quiet(self, job: JobStatus) -> bool:
        return False


def stepped_broker(real: Broker, recorder: Recorder) -> Broker:
    """A broker for code that runs step by step."""
    jobs: Any = _SteppedJobs(real.jobs, recorder)
    upkeep: Any = _SteppedUpkeep(real.upkeep, recorder, real)
    workers: Any = _NobodyAsks()
    broker = Broker(real.settings, real.connection, jobs, workers, upkeep)
    broker.__dict__["drains"] = _SteppedDrains(real.drains, recorder)
    broker.__dict__["quotas"] = _Stepped(real.quotas, recorder)
    return broker


class _NoLease:
    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def end(self) -> None:
        pass


@contextmanager
def no_time_of_its_own(recorder: Recorder) -> Iterator[None]:
    """Within the block, client code gets time and randomness from the recorder, renews nothing by itself, and leaves
    reaping to the reaper."""
    clock = SimpleNamespace(
        **{name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
        | {
            "monotonic": lambda: recorder.instant("clock", recorder.clock),
            "sleep": lambda seconds: recorder.poll("sleep", None),
        }
    )
    dice = SimpleNamespace(token_hex=lambda size=8: recorder.token)
    with ExitStack() as stack:
        for place, stand_in in [
            ("embedctl_config.retry.time", clock),
            ("embedctl.waiting.waiter.time", clock),
            ("embedctl.waiting.submission.time", clock),
            ("embedctl.queueing.reaper.time", clock),
            ("embedctl.jobs.job.secrets", dice),
            ("embedctl.jobs.enqueue.secrets", dice),
            ("tests.explorer.bodies.secrets", dice),
            ("embedctl.waiting.submission.Lease", _NoLease),
            ("embedctl.jobs.enqueue._begun", lambda broker, options, ahead: broker.jobs.status(options.resume)),
            ("embedctl.queueing.reaper.Reaper.round", lambda reaper, *args, **named: None),
            ("embedctl.queueing.reaper.Reaper.rest", lambda reaper, *args, **named: None),
        ]:
            stack.enter_context(patch(place, stand_in, create=place.endswith(("time", "secrets"))))
        yield

"""The actors: everything that touches a job. Each yields its possible next steps as moves between states of the
world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from embedctl.queueing.broker import Broker
from embedctl.store import ClaimAnswer, Claimant, Completed, JobStatus
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError
from tests.explorer.snapshots import fields
from tests.explorer.steps import Log, Paused, frozen
from tests.explorer.world import State, World
from tests.support.store import MINE, QUEUE, encoded

#: The outcome of one actor's step: the new state of the world, without the new content of Redis, and a description.
Done = tuple[State, str]


@dataclass(frozen=True, slots=True)
class Move:
    """A possible step: the actor, the step's name, and the function that does it.

    The step uses up one `fault` of that name. Random walks choose a `rare` step as rarely as a fault.
    """

    who: str
    name: str
    do: Callable[[World], Done]
    fault: str = ""
    rare: bool = False


Body = Callable[[Broker, str], Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The progress of a program.

    Attributes:
        runs: how often it has begun.
        phase: `ready`, `running`, `over` or `dead`.
        told: how it ended: `returned`, or the name of the error.
        polled: whether it waits for something to happen.
        next: what it asks next.
        gave_up: whether the thread that keeps its right to add has ended.
        others: whether this or an earlier run used a variant other than the first.
    """

    runs: int = 0
    phase: str = "ready"
    variant: str = ""
    log: Log = ()
    told: str = ""
    value: Any = None
    polled: bool = False
    next: Any = ()
    gave_up: bool = False
    others: bool = False

    @property
    def key(self) -> Any:
        return (
            self.others,
            self.gave_up,
            self.runs,
            self.phase,
            self.variant if self.phase == "running" else "",
            tuple((answer.name, answer.key) for answer in self.log),
            self.told,
            self.polled,
            self.next,
        )

    @property
    def is_over(self) -> bool:
        return self.phase in ("over", "dead", "ready")


class Program:
    """Client code that runs step by step.

    Args:
        bodies: variant → the code. Each start chooses a variant, the first run the first.
        runs: how often it may begin; 0 means any number of times.
        mortal: whether it may die, while deaths are left.
        obliged: whether it also begins when nothing goes wrong any more, and must come to an end.
        holds: whether it keeps the right to add while it runs.
        begins: the variants with which it may begin in a given state. Once nothing goes wrong any more, it takes the
            first.
        before: what happens in the world just before it begins.
        only_fair: whether it rests until nothing goes wrong any more.
        sees: the part of a job's status that still matters once the next question is known.
        rare: whether it begins rarely.
    """

    def __init__(
        self,
        name: str,
        bodies: dict[str, Body],
        *,
        runs: int = 1,
        mortal: bool = False,
        obliged: bool = False,
        holds: bool = False,
        begins: Callable[[World, State], tuple[str, ...]] | None = None,
        before: Callable[[World], None] = lambda world: None,
        only_fair: bool = False,
        sees: Callable[[JobStatus], Any] = frozen,
        rare: bool = False,
    ) -> None:
        self._rare, self._before = rare, before
        self._sees = sees
        self._only_fair = only_fair
        self.name, self._bodies, self._runs = name, bodies, runs
        self._mortal, self.obliged, self._holds, self._begins = mortal, obliged, holds, begins

    def at_first(self) -> Run:
        return Run()

    def token(self, run: Run) -> str:
        return f"{self.name}{run.runs}"

    def holds(self, run: Run) -> str | None:
        """The token of the right to add that it holds now."""
        submitting = run.phase == "running" and not any(answer.name == "seal" for answer in run.log)
        return self.token(run) if submitting else None

    def moves(self, world: World, state: State, at: int) -> Iterator[Move]:
        run: Run = state.actors[at]
        if self._only_fair:
            return
        if run.phase == "running":
            yield Move(self.name, "step", lambda world: self._step(world, state, at))
            if state.may("lost answer"):
                yield Move(self.name, "step", lambda world: self._step(world, state, at, lose=True), "lost answer")
            if self._mortal and state.may("death"):
                yield Move(self.name, "dies", lambda world: self._die(state, at), "death")
            if self._holds and self._lost_its_right(world, state, run):
                yield Move(self.name, "renews its right", lambda world: self._hold(world, state, at))
        elif not self._runs or run.runs < self._runs:
            for variant in self._variants(world, state, run):
                yield self._beginning(state, at, variant)

    def fair_moves(self, world: World, state: State, at: int) -> Iterator[Move]:
        """Its moves when nothing goes wrong any more; none while it waits."""
        run: Run = state.actors[at]
        if run.phase == "running" and self._holds and self._lost_its_right(world, state, run):
            yield Move(self.name, "renews its right", lambda world: self._hold(world, state, at))
        elif run.phase == "running" and not run.polled:
            yield Move(self.name, "step", lambda world: self._step(world, state, at, follow=True))
        elif self.obliged and self._begins_by_itself(run):
            for variant in self._variants(world, state, run)[:1]:
                yield self._beginning(state, at, variant)

    def _begins_by_itself(self, run: Run) -> bool:
        return run.phase == "ready" or (run.phase == "over" and not self._runs)

    def _variants(self, world: World, state: State, run: Run) -> list[str]:
        if self._begins is not None:
            return list(self._begins(world, state))
        return list(self._bodies)[: None if run.runs else 1]

    def _beginning(self, state: State, at: int, variant: str) -> Move:
        run: Run = state.actors[at]

        def begin(world: World) -> Done:
            others = run.others or (self._begins is None and variant != next(iter(self._bodies)))
            self._before(world)
            begun = Run(run.runs + 1 if self._runs else 1, "running", variant, others=others)
            after, what = self._step(world, state.with_actor(at, begun), at)
            return after, f"begins {variant}: {what}"

        return Move(self.name, f"begins {variant}".rstrip(), begin, rare=self._rare)

    def _step(self, world: World, state: State, at: int, *, lose: bool = False, follow: bool = False) -> Done:
        run: Run = state.actors[at]
        recorder = world.recorder
        recorder.begin(run.log, self.token(run), sees=self._sees, lose=lose, follow=follow, clock=world.clock)
        world.sent.clear()
        try:
            value = self._bodies[run.variant](world.stepped, world.job_id)
            after = replace(run, phase="over", log=(), next=(), told="returned", value=value, polled=False)
        except Paused:
            after = replace(run, log=tuple(recorder.log), polled=recorder.polled, next=recorder.next)
        except EmbedctlError as error:
            after = replace(
                run, phase="over", log=(), next=(), told=type(error).__name__, value=str(error), polled=False
            )
        what = recorder.last + (f"; {after.told} {_short(after.value)}" if after.phase == "over" else "")
        return state.with_actor(at, after).with_tickets(*world.sent), what

    def _die(self, state: State, at: int) -> Done:
        run: Run = state.actors[at]
        if not self._runs:  # it may begin any number of times: another one of its kind takes over
            return state.with_actor(at, replace(run, phase="ready", log=(), next=(), polled=False)), "dies"
        return state.with_actor(at, replace(run, phase="dead", log=(), next=(), polled=False)), "dies"

    def _lost_its_right(self, world: World, state: State, run: Run) -> bool:
        token = self.holds(run)
        added = any(answer.name in ("add", "hold") for answer in run.log)
        return (
            token is not None
            and added
            and not run.gave_up
            and keys.producer(world.job_id).encode() not in state.snapshot
        )

    def _hold(self, world: World, state: State, at: int) -> Done:
        try:
            held = world.broker.jobs.hold(world.job_id, self.token(state.actors[at]))
        except EmbedctlError as error:
            given_up = state.with_actor(at, replace(state.actors[at], gave_up=True))
            return given_up, f"keeps its right: {type(error).__name__}"
        if keys.producer(world.job_id).encode() not in world.connection.look():  # sealed: nothing is left to add
            state = state.with_actor(at, replace(state.actors[at], gave_up=True))
        return state, f"keeps its right → {held}"


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) < 100 else text[:97] + "…"


@dataclass(frozen=True, slots=True)
class Hand:
    """The state of a worker: `idle`, `took` a ticket, `held` a chunk, about to `issue` or to `send`, or `dead`."""

    doing: str = "idle"
    chunk: int = -1
    token: str = ""
    input: bytes = b""
    send: tuple[int, ...] = ()

    @property
    def key(self) -> Any:
        return (self.doing, self.chunk, self.token, self.input, self.send)

    @property
    def is_over(self) -> bool:
        return self.doing in ("idle", "dead")


class Worker:
    """A worker that holds one chunk at a time.

    Args:
        fails: the numbers of records that may fail when a chunk completes.
        releases: whether it may give a chunk back.
        mortal: whether it may die, while deaths are left.
    """

    obliged = False

    def __init__(
        self, name: str, *, fails: tuple[int, ...] = (0,), releases: bool = False, mortal: bool = True
    ) -> None:
        self.name, self._fails, self._releases, self._mortal = name, fails, releases, mortal

    def at_first(self) -> Hand:
        return Hand()

    def holds(self, hand: Hand) -> None:
        return None

    def moves(self, world: World, state: State, at: int) -> Iterator[Move]:
        hand: Hand = state.actors[at]
        if hand.doing == "idle":
            for chunk in sorted(set(state.tickets)):
                yield self._taking(state, at, chunk)
        elif hand.doing == "held":
            for failed in self._fails:
                yield self._completing(state, at, failed)
            if state.may("lost answer"):
                yield self._completing(state, at, 0, lose=True)
            yield Move(self.name, f"renews {hand.chunk}", lambda world: self._renew(world, state, at))
            if self._releases:
                yield Move(self.name, f"releases {hand.chunk}", lambda world: self._release(world, state, at))
        elif hand.doing in ("took", "issue", "send"):
            yield Move(self.name, hand.doing, lambda world: self._go_on(world, state, at))
            if hand.doing == "took" and state.may("lost answer"):
                yield Move(self.name, "claim", lambda world: self._claim(world, state, at, lose=True), "lost answer")
        if self._mortal and hand.doing != "dead" and state.may("death"):
            for how in (False, True):
                name = "dies, and is seen to" if how else "dies"
                yield Move(self.name, name, lambda world, how=how: self._die(world, state, at, how), "death")  # type: ignore[misc]

    def fair_moves(self, world: World, state: State, at: int) -> Iterator[Move]:
        hand: Hand = state.actors[at]
        if hand.doing == "dead":
            yield Move(self.name, "starts again", lambda world: self._start(world, state, at))
        elif hand.doing == "idle":
            for chunk in sorted(set(state.tickets))[:1]:
                yield self._taking(state, at, chunk)
        elif hand.doing == "held":
            yield self._completing(state, at, 0)
        else:
            yield Move(self.name, hand.doing, lambda world: self._go_on(world, state, at))

    def _taking(self, state: State, at: int, chunk: int) -> Move:
        def take(world: World) -> Done:
            owners = [state.snapshot, *(past.snapshot for past in state.history)]
            used = {
                owner.split(b" ")[0].decode()
                for snapshot in owners
                for owner in fields(snapshot.get(keys.owners(world.job_id).encode())).values()
            }
            token = next(name for each in range(99) if (name := f"{self.name}.{each}") not in used)
            taken = state.without_ticket(chunk).with_actor(at, Hand("took", chunk, token))
            # No other actor can see that a ticket was taken, so the claim is the step.
            return self._claim(world, taken, at)

        return Move(self.name, f"takes {chunk}", take)

    def _claim(self, world: World, state: State, at: int, *, lose: bool = False) -> Done:
        hand: Hand = state.actors[at]
        claim = world.broker.jobs.claim(world.job_id, hand.chunk, hand.token, Claimant(self.name, MINE))
        what = f"claim({hand.chunk}) → {claim.answer}"
        if lose:
            return state, what + ", and the answer is lost"
        if claim.answer is not ClaimAnswer.OK:
            return state.with_actor(at, Hand()), what
        if claim.given_up is not None:
            what += ", suspect"
        return state.with_actor(at, replace(hand, doing="held", input=claim.input)), what

    def _completing(self, state: State, at: int, failed: int, *, lose: bool = False) -> Move:
        hand: Hand = state.actors[at]

        def complete(world: World) -> Done:
            payload, report = result_of(hand.input, failed)
            answer = world.broker.jobs.complete(world.job_id, hand.chunk, hand.token, payload, report, fingerprint=MINE)
            what = f"complete({hand.chunk}, {report.failed} failed) → {answer}"
            if lose:
                return state, what + ", and the answer is lost"
            after = Hand("issue", hand.chunk) if answer == "ok" else Hand()
            return state.with_actor(at, after), what

        return Move(self.name, f"completes {hand.chunk} {failed}", complete, "lost answer" if lose else "")

    def _renew(self, world: World, state: State, at: int) -> Done:
        hand: Hand = state.actors[at]
        answer = world.broker.jobs.renew(world.job_id, hand.chunk, hand.token)
        unwanted = answer in ("cancelled", "gone", "done")
        return state.with_actor(at, Hand()) if unwanted else state, f"renew({hand.chunk}) → {answer}"

    def _release(self, world: World, state: State, at: int) -> Done:
        hand: Hand = state.actors[at]
        gone = world.broker.jobs.release(world.job_id, hand.chunk, hand.token, delay_s=0)
        # A worker that has to stop before a chunk's turn comes does the same: it sends the ticket on.
        return state.with_actor(at, Hand("send", send=(hand.chunk,))), f"release({hand.chunk}) → {gone}"

    def _go_on(self, world: World, state: State, at: int) -> Done:
        hand: Hand = state.actors[at]
        if hand.doing == "took":
            return self._claim(world, state, at)
        if hand.doing == "send":
            return state.with_tickets(*hand.send).with_actor(at, Hand()), f"sends tickets {list(hand.send)}"
        chunks = [each.chunk for each in world.broker.jobs.issue(world.job_id, QUEUE, hand.chunk)]
        after = Hand("send", send=tuple(chunks)) if chunks else Hand()
        return state.with_actor(at, after), f"issue → {chunks}"

    def _die(self, world: World, state: State, at: int, witnessed: bool) -> Done:
        world.die(self.name, witnessed=witnessed)
        return state.with_actor(at, Hand("dead")), "dies, and is seen to" if witnessed else "dies"

    def _start(self, world: World, state: State, at: int) -> Done:
        world.beat(self.name)
        return state.with_actor(at, Hand()), "starts again"


@lru_cache(maxsize=1000)
def result_of(data: bytes, failed: int) -> tuple[bytes, Completed]:
    """The result of an input whose first rows fail, and the report that goes with it."""
    return encoded(data, range(failed))


Actor = Program | Worker

"""The actors: everything that touches a job. Each yields its possible next steps as moves between states of the
world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

from embedctl.queueing.broker import Broker
from embedctl.store import Claimant, Completed, Given, JobStatus
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError
from tests.explorer.snapshots import LONG_S
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


@dataclass
class Program:
    """Client code that runs step by step."""

    name: str
    #: Variant → the code. Each start chooses a variant, the first run the first.
    bodies: dict[str, Body]
    #: How often it may begin; 0 means any number of times.
    runs: int = 1
    #: Whether it may die, while deaths are left.
    mortal: bool = False
    #: Whether it also begins when nothing goes wrong any more, and must come to an end.
    obliged: bool = False
    #: Whether it keeps the right to add while it runs.
    adds: bool = False
    #: The variants with which it may begin in a state. Once nothing goes wrong any more, it takes the first.
    begins: Callable[[World, State], tuple[str, ...]] | None = None
    #: What happens in the world just before it begins.
    before: Callable[[World], None] = lambda world: None
    #: Whether it rests until nothing goes wrong any more.
    only_fair: bool = False
    #: The part of a job's status that still matters once the next question is known.
    sees: Callable[[JobStatus], Any] = frozen
    #: Whether it begins rarely.
    rare: bool = False

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
        if self.only_fair:
            return
        if run.phase == "running":
            yield Move(self.name, "step", lambda world: self._step(world, state, at))
            if state.may("lost answer"):
                yield Move(self.name, "step", lambda world: self._step(world, state, at, lose=True), "lost answer")
            if self.mortal and state.may("death"):
                yield Move(self.name, "dies", lambda world: self._die(state, at), "death")
            if self.adds and self._lost_its_right(world, state, run):
                yield Move(self.name, "renews its right", lambda world: self._hold(world, state, at))
        elif not self.runs or run.runs < self.runs:
            for variant in self._variants(world, state, run):
                yield self._beginning(state, at, variant)

    def fair_moves(self, world: World, state: State, at: int) -> Iterator[Move]:
        """Its moves when nothing goes wrong any more; none while it waits."""
        run: Run = state.actors[at]
        if run.phase == "running" and self.adds and self._lost_its_right(world, state, run):
            yield Move(self.name, "renews its right", lambda world: self._hold(world, state, at))
        elif run.phase == "running" and not run.polled:
            yield Move(self.name, "step", lambda world: self._step(world, state, at, follow=True))
        elif self.obliged and self._begins_by_itself(run):
            for variant in self._variants(world, state, run)[:1]:
                yield self._beginning(state, at, variant)

    def _begins_by_itself(self, run: Run) -> bool:
        return run.phase == "ready" or (run.phase == "over" and not self.runs)

    def _variants(self, world: World, state: State, run: Run) -> list[str]:
        if self.begins is not None:
            return list(self.begins(world, state))
        return list(self.bodies)[: None if run.runs else 1]

    def _beginning(self, state: State, at: int, variant: str) -> Move:
        run: Run = state.actors[at]

        def begin(world: World) -> Done:
            others = run.others or (self.begins is None and variant != next(iter(self.bodies)))
            self.before(world)
            begun = Run(run.runs + 1 if self.runs else 1, "running", variant, others=others)
            after, what = self._step(world, state.with_actor(at, begun), at)
            return after, f"begins {variant}: {what}"

        return Move(self.name, f"begins {variant}".rstrip(), begin, rare=self.rare)

    def _step(self, world: World, state: State, at: int, *, lose: bool = False, follow: bool = False) -> Done:
        run: Run = state.actors[at]
        recorder = world.recorder
        recorder.begin(run.log, self.token(run), sees=self.sees, lose=lose, follow=follow, clock=world.clock)
        try:
            value = self.bodies[run.variant](world.stepped, world.job_id)
            after = replace(run, phase="over", log=(), next=(), told="returned", value=value, polled=False)
        except Paused:
            after = replace(run, log=tuple(recorder.log), polled=recorder.polled, next=recorder.next)
        except EmbedctlError as error:
            after = replace(
                run, phase="over", log=(), next=(), told=type(error).__name__, value=str(error), polled=False
            )
        what = recorder.last + (f"; {after.told} {_short(after.value)}" if after.phase == "over" else "")
        return state.with_actor(at, after), what

    def _die(self, state: State, at: int) -> Done:
        run: Run = state.actors[at]
        if not self.runs:  # it may begin any number of times: another one of its kind takes over
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
class Held:
    """A chunk that a worker holds."""

    job_id: str
    chunk: int
    token: str
    input: bytes


@dataclass(frozen=True, slots=True)
class Hand:
    """The state of a worker.

    Attributes:
        doing: `idle`, `asks` (the answer was lost), `holds` or `dead`.
        token: with which it asked for a chunk whose answer was lost.
        polled: whether it waits for something to happen.
    """

    doing: str = "idle"
    token: str = ""
    held: tuple[Held, ...] = ()
    polled: bool = False

    @property
    def key(self) -> Any:
        return (self.doing, self.token, self.held, self.polled)

    @property
    def is_over(self) -> bool:
        return self.doing in ("idle", "dead")


#: How a chunk is given back: in words, after a delay, and so long to others first (seconds).
_RELEASES = (("gives back", 0.0, 0.0), ("puts off", LONG_S, 0.0), ("leaves to others", 0.0, LONG_S))


@dataclass
class Worker:
    """A worker. It may ask for a chunk at any time, as if at a forged bell."""

    name: str
    #: The numbers of records that may fail when a chunk completes.
    fails: tuple[int, ...] = (0,)
    #: Whether it may give a chunk back.
    releases: bool = False
    #: Whether it may take others beside one that it holds.
    gathers: bool = False
    #: Whether it may die, while deaths are left.
    mortal: bool = True
    #: Of its model.
    fingerprint: str = MINE
    #: Whether it takes only what may kill a worker. It then asks without a bell.
    quarantine: bool = False
    obliged: ClassVar = False

    def at_first(self) -> Hand:
        return Hand()

    def holds(self, hand: Hand) -> None:
        return None

    def moves(self, world: World, state: State, at: int) -> Iterator[Move]:
        hand: Hand = state.actors[at]
        loses = state.may("lost answer")
        bells = 0 if self.quarantine else state.snapshot.bells
        if hand.doing == "idle" and (bells or self._is_offered(state)):
            yield self._hearing(state, at)
            if loses:
                yield self._hearing(state, at, lose=True)
            if not (bells or self.quarantine):
                yield Move(self.name, "rings", lambda world: self._ring(world, state))
        elif hand.doing == "asks":
            yield Move(self.name, "asks again", lambda world: self._claim(world, state, at, hand.token))
            yield Move(self.name, "gives up", lambda world: (state.with_actor(at, Hand()), "gives up"))
        elif hand.doing == "holds":
            for failed in self.fails:
                yield self._completing(state, at, failed)
            if loses:
                yield self._completing(state, at, 0, lose=True)
            yield Move(self.name, "renews", lambda world: self._renew(world, state, at))
            if self.gathers and len(hand.held) == 1:
                yield Move(self.name, "gathers", lambda world: self._gather(world, state, at))
            for words, delay_s, others_first_s in _RELEASES if self.releases else ():
                give = partial(self._release, state=state, at=at, delay_s=delay_s, others_first_s=others_first_s)
                yield Move(self.name, words, give)
        if self.mortal and hand.doing != "dead" and state.may("death"):
            for how in (False, True):
                name = "dies, and is seen to" if how else "dies"
                yield Move(self.name, name, partial(self._die, state=state, at=at, witnessed=how), "death")

    def fair_moves(self, world: World, state: State, at: int) -> Iterator[Move]:
        hand: Hand = state.actors[at]
        if hand.doing == "dead":
            yield Move(self.name, "starts again", lambda world: self._start(world, state, at))
        elif hand.doing == "asks":
            yield Move(self.name, "asks again", lambda world: self._claim(world, state, at, hand.token))
        elif hand.doing == "holds":
            yield self._completing(state, at, 0)
        elif not hand.polled and (self._is_offered(state) if self.quarantine else state.snapshot.bells):
            yield self._hearing(state, at, follow=True)
        elif not (hand.polled or self.quarantine) and self._is_offered(state):
            yield Move(self.name, "rings", lambda world: self._ring(world, state))

    def _is_offered(self, state: State) -> bool:
        return state.snapshot.is_listed(self.fingerprint, quarantine=self.quarantine)

    def _ring(self, world: World, state: State) -> Done:
        world.broker.jobs.ring("fp32", {QUEUE: self.fingerprint})
        return state, "rings"

    def _hearing(self, state: State, at: int, *, lose: bool = False, follow: bool = False) -> Move:
        def hear(world: World) -> Done:
            if not self.quarantine:
                world.hear()
            return self._claim(world, state, at, self._new_token(world, state, at), lose=lose, follow=follow)

        return Move(self.name, "hears a bell", hear, "lost answer" if lose else "")

    def _new_token(self, world: World, state: State, at: int) -> str:
        """A token that is in no content of Redis that may come back."""
        hand: Hand = state.actors[at]
        used = {each.token for each in hand.held}
        for snapshot in (state.snapshot, *(past.snapshot for past in state.history)):
            used |= {key.rpartition(b":")[2].decode() for key in snapshot if key.startswith(keys.given("").encode())}
            for view in world.views(snapshot):
                used |= {owner.split(b" ")[0].decode() for owner in view.fields(keys.owners(view.job_id)).values()}
        return next(name for each in range(99) if (name := f"{self.name}.{each}") not in used)

    def _by(self) -> Claimant:
        return Claimant(self.name, self.fingerprint, "fp32", quarantine=self.quarantine)

    def _claim(
        self, world: World, state: State, at: int, token: str, *, lose: bool = False, follow: bool = False
    ) -> Done:
        given = world.broker.jobs.next(QUEUE, token, self._by())
        if lose:
            return state.with_actor(at, Hand("asks", token)), f"next({token}), and the answer is lost"
        return self._taken(world, state, at, given, token, follow=follow)

    def _gather(self, world: World, state: State, at: int) -> Done:
        job = world.broker.jobs.status(world.job_id)
        token = self._new_token(world, state, at)
        return self._taken(world, state, at, world.broker.jobs.gather(job, token, self._by(), 10_000), token)

    def _taken(self, world: World, state: State, at: int, given: Given, token: str, *, follow: bool = False) -> Done:
        assert not given.unusable, given.unusable
        world.forget_given(token)
        hand: Hand = state.actors[at]
        held = *hand.held, *(Held(each.job_id, each.chunk, each.token, each.input) for each in given.claims)
        what = f"next({token}) → {[each.chunk for each in given.claims]}" + ", later" * given.later
        what += ", suspect" * any(each.given_up is not None for each in given.claims)
        return state.with_actor(at, Hand("holds", held=held) if held else Hand(polled=follow)), what

    def _completing(self, state: State, at: int, failed: int, *, lose: bool = False) -> Move:
        hand: Hand = state.actors[at]
        each = hand.held[0]

        def complete(world: World) -> Done:
            value, report = result_of(each.input, failed, self.fingerprint)
            answer = world.broker.jobs.complete(
                each.job_id, each.chunk, each.token, value, report, fingerprint=self.fingerprint
            )
            what = f"complete({each.chunk}, {report.failed} failed) → {answer}"
            return (state, what + ", and the answer is lost") if lose else (self._without(state, at), what)

        return Move(self.name, f"completes {each.chunk} {failed}", complete, "lost answer" if lose else "")

    @staticmethod
    def _without(state: State, at: int) -> State:
        """The state once a worker has done with the first chunk that it holds."""
        hand: Hand = state.actors[at]
        return state.with_actor(at, Hand("holds", held=hand.held[1:]) if hand.held[1:] else Hand())

    def _renew(self, world: World, state: State, at: int) -> Done:
        each = state.actors[at].held[0]
        answer = world.broker.jobs.renew(each.job_id, each.chunk, each.token)
        unwanted = answer in ("cancelled", "gone", "done")
        return self._without(state, at) if unwanted else state, f"renew({each.chunk}) → {answer}"

    def _release(self, world: World, state: State, at: int, delay_s: float, others_first_s: float) -> Done:
        each = state.actors[at].held[0]
        gone = world.broker.jobs.release(
            each.job_id, each.chunk, each.token, delay_s=delay_s, others_first_s=others_first_s
        )
        return self._without(state, at), f"release({each.chunk}, {delay_s}, {others_first_s}) → {gone}"

    def _die(self, world: World, state: State, at: int, witnessed: bool) -> Done:
        if state.actors[at].doing == "idle" and not self.quarantine:
            world.hear()  # the bell dies with it
        world.die(self.name, witnessed=witnessed, quarantine=self.quarantine)
        return state.with_actor(at, Hand("dead")), "dies, and is seen to" if witnessed else "dies"

    def _start(self, world: World, state: State, at: int) -> Done:
        world.beat(self.name, quarantine=self.quarantine)
        return state.with_actor(at, Hand()), "starts again"


@lru_cache(maxsize=1000)
def result_of(data: bytes, failed: int, fingerprint: str = MINE) -> tuple[bytes, Completed]:
    """The result of an input whose first rows fail, and the report that goes with it."""
    return encoded(data, range(failed), fingerprint=fingerprint)


Actor = Program | Worker

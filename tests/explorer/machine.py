"""Goes through the states of a world: exhaustively within bounds, or in random walks from a seed.

A state is the content of Redis plus the knowledge of every actor (`world.State`). A move puts one state into Redis,
then either does one round trip of one actor or lets one thing go wrong, and reads the next state. States that no actor
can tell apart are visited once. From each state that is not yet known to end well, all live actors go on fairly, and
nothing goes wrong any more, until nothing changes. The invariants that must become true are checked there.
"""

from __future__ import annotations

import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from embedctl_config import keys, wire
from tests.explorer.actors import Actor, Move, Run, Worker
from tests.explorer.invariants import Violation, after_step, at_rest
from tests.explorer.snapshots import FAULTS, TURNS, WATCHED, ScriptFault, Snapshot, fields, lies_in_the_past
from tests.explorer.world import Past, State, World

#: The probability that a step of a random walk is a fault or a rare move.
_SELDOM = 0.12
_FAIR_ROUNDS = 80
_FAIR_STEPS = 60
#: After this many rounds in which time passed but nothing changed, nothing will change any more.
_QUIET_ROUNDS = 4
#: Seconds that pass on every clock per round without change: longer than any patience of client code, except for an
#: outage.
_ROUND_S = 45.0
#: Steps of a random walk.
_WALK_STEPS = 90


class Found(Exception):
    """A violation and the steps that lead to it."""

    def __init__(self, violation: Violation, trace: list[str]) -> None:
        super().__init__(violation)
        self.violation, self.trace = violation, trace
        #: The seed of the walk that found it; None if the exhaustive exploration found it.
        self.seed: int | None = None

    def __str__(self) -> str:
        steps = "\n".join(f"  {at:2}. {step}" for at, step in enumerate(self.trace, 1))
        seed = "" if self.seed is None else f" (seed {self.seed})"
        return f"{self.violation.invariant}: {self.violation.seen}{seed}\n{steps}"


@dataclass
class Coverage:
    """How far an exploration went."""

    states: int = 0
    steps: int = 0
    fair_steps: int = 0
    found: list[Found] = field(default_factory=list)

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            self.states + other.states,
            self.steps + other.steps,
            self.fair_steps + other.fair_steps,
            self.found + other.found,
        )

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.states} distinct states, {self.fair_steps} fair steps"


class Machine:
    """One scenario in one world. Redis may go back `history` steps at most."""

    def __init__(self, world: World, actors: tuple[Actor, ...], left: dict[str, int], *, history: int = 4) -> None:
        self.world, self.actors, self._history = world, actors, history
        self._ends: dict[int, list[Violation]] = {}
        for actor in actors:
            if isinstance(actor, Worker):
                world.beat(actor.name, quarantine=actor.quarantine)
        snapshot = world.connection.look()
        view = world.view(snapshot)
        results = ((chunk, view.result(chunk)) for chunk in range(view.number("added")))
        self.first = State(
            snapshot=snapshot,
            texts=tuple((chunk, result.digest) for chunk, result in results if result is not None),
            actors=tuple(actor.at_first() for actor in actors),
            left=tuple(sorted(left.items())),
        )

    def moves(self, state: State) -> list[Move]:
        found: list[Move] = []
        for at, actor in enumerate(self.actors):
            found += actor.moves(self.world, state, at)
        found += self._time(state)
        return found

    def _time(self, state: State) -> Iterator[Move]:
        view = self.world.view(state.snapshot)
        if state.may("lapse"):
            for what, happen in self._lapses(state):
                yield _passing(state, what, happen, "lapse")
            if view.text("sealed") == "1" and not view.ended and int(view.text("progressed_ms") or 0) > 1:
                yield _passing(state, "the last progress is long ago", World.grow_old, "lapse")
        holder = view.string(keys.producer(view.job_id))
        if holder is not None:
            lives = self._lives(state, holder.decode())
            if not lives or state.may("lapse"):
                yield _passing(state, "the right to add lapses", World.end_producer_lease, "lapse" if lives else "")
        if state.may("lost result"):
            for index in range(view.number("added")):
                if view.result(index) is not None:
                    yield Move("redis", f"loses the result of {index}", self._losing(state, index), "lost result")
        if state.may("rollback"):
            for back, past in enumerate(reversed(state.history), 1):
                yield Move("redis", f"goes back {back}", self._going_back(state, past, back), "rollback")
        if state.may("lost bells") and state.snapshot.bells:
            yield _passing(state, "the bells are lost", World.lose_bells, "lost bells")
        if state.may("lost turns"):
            for kind in sorted({key.split(b":")[2] for key in state.snapshot if key.startswith(TURNS)}):
                lose = partial(World.lose_turns, kind=kind.decode())
                yield _passing(state, f"loses {kind.decode()}", lose, "lost turns", who="redis")

    def _lapses(self, state: State) -> Iterator[tuple[str, Callable[[World], None]]]:
        """Each time that may come to be past: what that is, and how it happens."""
        for view in self.world.views(state.snapshot):
            for chunk, owner in sorted(view.fields(keys.owners(view.job_id)).items()):
                if not lies_in_the_past(owner.split(b" ")[4]):
                    lapse = partial(World.lapse, job_id=view.job_id, chunk=chunk, owner=owner)
                    yield f"the lease of {int(chunk)} lapses", lapse
            for key in (keys.ready(view.job_id), keys.suspects(view.job_id)):
                for chunk, score in sorted(view.fields(key).items()):
                    if not lies_in_the_past(score):
                        yield f"{int(chunk)} may be taken again", partial(World.let_take, key=key, chunk=chunk)
            for name, facts in sorted(view.fields(keys.attempts(view.job_id)).items()):
                instance, _, until_ms = facts.partition(b" ")
                if name.endswith(b":not") and not lies_in_the_past(until_ms):
                    again = partial(World.let_again, job_id=view.job_id, field=name, instance=instance)
                    yield f"{name.decode()} is over", again
            if view.number("distrusted_ms") > 1:
                yield "the job is trusted again", partial(World.trust, job_id=view.job_id)
            if view.number("watched_ms") > 1:
                yield "the job is watched no longer", partial(World.watch_no_longer, job_id=view.job_id)
        for name, value in sorted(state.snapshot.items()):
            if name.startswith(FAULTS):
                for field in (b"distrusted_ms", b"watched_ms"):
                    if int(fields(value).get(field, 0)) > 1:
                        yield f"a tenant's {field.decode()} is over", partial(World.forgive, key=name, field=field)
            if name.startswith(WATCHED) and b" 1 " not in value and value.count(b" ") == 2:
                who, (whose, _, waiting) = name.removeprefix(WATCHED).decode(), value[1:].decode().split(" ")
                yield f"{who} was long a job's", partial(World.let_go, instance=who, job_id=whose, waiting=waiting)
        given = keys.given("").encode()
        for name in sorted(state.snapshot):
            if name.startswith(given):
                token = name.removeprefix(given).decode()
                yield f"what {token} was given is forgotten", partial(World.forget_given, token=token)

    def _lives(self, state: State, token: str) -> bool:
        return any(actor.holds(known) == token for actor, known in zip(self.actors, state.actors, strict=True))

    def _losing(self, state: State, chunk: int) -> Callable[[World], tuple[State, str]]:
        def do(world: World) -> tuple[State, str]:
            world.lose_result(chunk)
            return replace(state, lost=(*state.lost, chunk), went_back=True), f"loses the result of {chunk}"

        return do

    def _going_back(self, state: State, past: Past, back: int) -> Callable[[World], tuple[State, str]]:
        def do(world: World) -> tuple[State, str]:
            world.connection.put(past.snapshot)
            return replace(state, texts=past.texts, history=(), went_back=True), f"goes back {back} writes"

        return do

    def make(self, state: State, move: Move) -> tuple[State, str, list[Violation]]:
        """Make a move. Return the state after it, the move in words, and the violations."""
        world = self.world
        world.connection.put(state.snapshot)
        try:
            after, what = move.do(world)
        except ScriptFault as fault:
            return state, f"{move.who}: {move.name}", [Violation("no script fails", str(fault))]
        snapshot = world.connection.look()
        if after is state:  # a copy, because cached properties belong to the old state
            after = replace(state)
        changed = snapshot.canonical != state.snapshot.canonical
        texts = after.texts if move.who == "redis" else self._texts(after, snapshot)
        after = replace(after, snapshot=snapshot, texts=texts)
        if move.fault:
            after = after.spend(move.fault)
        if after.may("rollback") and move.who != "redis" and changed:
            before = Past(state.snapshot, state.texts)
            after = replace(after, history=(*state.history, before)[-self._history :])
        wrong = list(after_step(world, state, after, reopens=self._reopens(move, what), goes_back=move.who == "redis"))
        return after, f"{move.who}: {what}", wrong

    @staticmethod
    def _reopens(move: Move, what: str) -> bool:
        return move.who == "redis" or any(step in what for step in ("retry(", "add(", "resume("))

    def _texts(self, state: State, snapshot: Snapshot) -> tuple[tuple[int, bytes], ...]:
        view = self.world.view(snapshot)
        known = dict(state.texts)
        for chunk in range(view.number("added")):
            data = view.input(chunk)
            encoded = view.result(chunk) is not None or view.is_void(chunk) or view.is_missing(chunk)
            if data is not None and not encoded:  # else the input holds the failed records alone
                known[chunk] = wire.digest_of(data)
        return tuple(sorted(known.items()))

    def settle(self, state: State, coverage: Coverage) -> tuple[list[str], list[Violation]]:
        """Let all live actors go on with nothing going wrong. Return the steps and the violations at the end."""
        try:
            return self._settle(state, coverage)
        finally:
            self.world.clock = 1000.0

    def _settle(self, state: State, coverage: Coverage) -> tuple[list[str], list[Violation]]:
        trace: list[str] = []
        passed: list[int] = []
        quiet = 0
        state = replace(state, history=(), left=tuple((name, 0) for name, _ in state.left))
        for _ in range(_FAIR_ROUNDS):
            mark = self._mark(state)
            state = self._awake(state)
            if (known := self._known(state, passed)) is not None:
                return trace, known
            for at in range(len(self.actors)):
                for _ in range(_FAIR_STEPS):
                    move = next(iter(self.actors[at].fair_moves(self.world, state, at)), None)
                    if move is None:
                        break
                    state, what, wrong = self.make(state, move)
                    coverage.fair_steps += 1
                    trace.append(f"then {what}")
                    if wrong:
                        return trace, self._learnt(passed, wrong)
                    if (known := self._known(state, passed)) is not None:
                        return trace, known
                    if isinstance(state.actors[at], Run) and state.actors[at].is_over:
                        break
            if self._mark(state) != mark:
                quiet = 0
                continue
            quiet += 1
            if quiet > _QUIET_ROUNDS:
                return trace, self._learnt(passed, list(at_rest(self.world, state, self.actors)))
            state = self._time_passes(state)
        return trace, [Violation("it comes to rest", f"it goes on after {_FAIR_ROUNDS} rounds")]

    def _known(self, state: State, passed: list[int]) -> list[Violation] | None:
        """How a state ends, if it was passed before. Otherwise remember that it is passed now."""
        key = self._awake(state).key
        if key in self._ends:
            return self._learnt(passed, self._ends[key])
        passed.append(key)
        return None

    def _learnt(self, passed: list[int], wrong: list[Violation]) -> list[Violation]:
        self._ends.update(dict.fromkeys(passed, wrong))
        return wrong

    def _mark(self, state: State) -> object:
        runs = tuple((each.runs, each.phase) if isinstance(each, Run) else each.key for each in state.actors)
        return state.snapshot.canonical, runs

    @staticmethod
    def _awake(state: State) -> State:
        if not any(each.polled for each in state.actors):
            return state
        return replace(state, actors=tuple(replace(each, polled=False) for each in state.actors))

    def _time_passes(self, state: State) -> State:
        world = self.world
        world.clock += _ROUND_S
        world.connection.put(state.snapshot)
        view = world.view(state.snapshot)
        for _, happen in list(self._lapses(state)):
            happen(world)
        holder = view.string(keys.producer(view.job_id))
        if holder is not None and not self._lives(state, holder.decode()):
            world.end_producer_lease()
        if view.job and not view.ended:
            world.grow_old()
        return replace(state, snapshot=world.connection.look())

    def explore(self, *, most: int = 10**9, seconds: float = 300.0, stop_at: str | None = None) -> Coverage:
        """Go through all states, nearest first, for so many steps and seconds, or until `stop_at` is violated."""
        until = time.monotonic() + seconds
        coverage = Coverage()
        parents: dict[int, tuple[int, str]] = {}
        queue = deque([self.first])
        seen = {self.first.key}
        told: set[tuple[str, str]] = set()

        def report(key: int, extra: list[str], wrong: list[Violation]) -> bool:
            for violation in wrong:
                kind = (violation.invariant, re.sub(r"\d{5,}", "…", violation.seen))
                if kind not in told:
                    told.add(kind)
                    coverage.found.append(Found(violation, _trace(parents, key) + extra))
            return any(violation.invariant == stop_at for violation in wrong)

        def visit(state: State) -> bool:
            if report(state.key, *self.settle(state, coverage)):
                return True
            for move in self.moves(state):
                after, what, wrong = self.make(state, move)
                coverage.steps += 1
                if report(state.key, [what], wrong):
                    return True
                if not wrong and after.key not in seen:  # what follows a violation tells nothing new
                    seen.add(after.key)
                    parents[after.key] = (state.key, what)
                    queue.append(after)
            return False

        while queue and coverage.steps < most and time.monotonic() < until and not visit(queue.popleft()):
            pass
        coverage.states = len(seen)
        return coverage

    def _walk(self, seed: int, coverage: Coverage) -> Found | None:
        """Take one random walk from a seed. Return the violation that it finds, or None."""
        dice = random.Random(seed)
        state, trace = self.first, []
        for _ in range(_WALK_STEPS):
            moves = self.moves(state)
            if not moves:
                break
            # Choose the actor first. Faults are rare: otherwise all would be used up before there is anything that
            # they could hurt.
            seldom = [each for each in moves if each.fault or each.rare]
            often = [each for each in moves if not (each.fault or each.rare)]
            moves = seldom if seldom and (not often or dice.random() < _SELDOM) else often
            who = dice.choice(sorted({(move.who, move.fault) for move in moves}))
            move = dice.choice([each for each in moves if (each.who, each.fault) == who])
            after, what, wrong = self.make(state, move)
            coverage.steps += 1
            trace.append(what)
            if wrong:
                return Found(wrong[0], trace)
            state = after
        extra, wrong = self.settle(state, coverage)
        return Found(wrong[0], trace + extra) if wrong else None

    def walks(self, seeds: Iterable[int], *, seconds: float = 60.0) -> Coverage:
        until = time.monotonic() + seconds
        coverage = Coverage()
        told: set[str] = set()
        for seed in seeds:
            if time.monotonic() > until:
                break
            met = self._walk(seed, coverage)
            if met is not None and met.violation.invariant not in told:
                told.add(met.violation.invariant)
                met.seed = seed
                coverage.found.append(met)
        coverage.states = len(self._ends)
        return coverage


def _passing(state: State, what: str, happen: Callable[[World], None], fault: str, who: str = "time") -> Move:
    """Time passes in one way, or Redis loses something."""

    def do(world: World) -> tuple[State, str]:
        happen(world)
        return state, what

    return Move(who, what, do, fault)


def _trace(parents: dict[int, tuple[int, str]], key: int) -> list[str]:
    trace = []
    while key in parents:
        key, what = parents[key]
        trace.append(what)
    return trace[::-1]

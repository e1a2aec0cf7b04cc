"""Jobs: their content, all drawn from the seed, and their expected results."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from embedctl_config.wire import ErrorCode
from embedctl_workers.backends.dummy import DummyBackend
from tests.chaos.options import DUMMY, Options
from tests.chaos.stack import DIM, FAR, GATEWAY, GUARDED, NEAR, PROXY

#: A record of a corpus: its text, and its id if it has one.
Item = dict[str, Any]

#: Words that make the dummy backend fail or die, and the error code of such a record.
SOFT_POISON = {
    "fail-tokenizer": ErrorCode.ENCODE_ERROR,
    "fail-encoder": ErrorCode.ENCODE_ERROR,
    "out-of-memory": ErrorCode.OUT_OF_MEMORY,
    "not-a-number": ErrorCode.NON_FINITE,
}
CRASHERS = {
    "crash-tokenizer": ErrorCode.CRASHED_WORKER,
    "crash-encoder": ErrorCode.CRASHED_WORKER,
    "kill-encoder": ErrorCode.CRASHED_WORKER,
    "hang-encoder": ErrorCode.CRASHED_WORKER,
}
POISON = {**SOFT_POISON, **CRASHERS}

#: The tenant of jobs that kill one after the other.
KILLERS = "killers"
#: The fields that some jobs keep. The last one is in no record.
KEPT = ("title", "of", "nowhere")

#: The relative frequency of each kind of job.
_KINDS = {"empty": 2, "single": 4, "small": 16, "medium": 32, "large": 20, "poison": 18, "crasher": 8}
#: Beside them where a run is to have many records: about one job in eight.
_HUGE = {"huge": 15}
_SIZES = {
    "single": (1, 1),
    "small": (2, 60),
    "medium": (60, 1000),
    "large": (1000, 6000),
    "poison": (5, 1000),
    "crasher": (3, 200),
    "huge": (5_000, 25_000),
}
#: Ranges for the number of words in most texts.
_LENGTHS = ((1, 4), (4, 30), (15, 90))
#: About how many words a second one worker of the slow class encodes.
_SLOW_WORDS_PER_S = 64 / 0.022
_QUICK_RECORDS_PER_S = 4000.0
_MOST_CHUNKS = 200
#: A job of the slow class takes one worker at most this long (seconds).
_LONGEST_S = 15.0


@dataclass(frozen=True)
class Plan:
    """One job: what is submitted and how."""

    index: int
    key: str
    kind: str
    model: str
    hardware: str
    ttl_s: float
    records: int = 0
    chunk_size: int | None = None
    words: tuple[int, int] = (4, 30)
    ids: str = "none"  # none, field, argument
    keep: tuple[str, ...] = ()
    count_tokens: bool = False
    long: str = "cut"
    normalize: bool = True
    prompt: str | None = None
    poison: Mapping[int, str] = field(default_factory=dict)
    by: str = "library"  # library, command
    link: str = NEAR
    seconds_per_record: float = 0.0
    max_errors: int | str | None = None
    #: The producer waits for workers while more text than this waits (bytes); None leaves the product's default.
    high_water: int | None = None
    #: Number of records at the start that have only a few words.
    short_head: int = 0
    #: Whether some records are empty, too long or duplicates.
    blemishes: bool = True
    #: Half of the jobs have a tenant and a lane of their own.
    tenant: str = "default"
    lane: str = "normal"

    @property
    def frees_key(self) -> bool:
        """Whether the job's key may be free again before its producer ends. The same command then makes another job."""
        return self.max_errors is not None or self.kind.startswith("cancelled")

    @property
    def counts(self) -> bool:
        """Whether its results have each record's number of tokens; no option of the command asks for that."""
        return self.count_tokens and self.by == "library"

    @property
    def crashers(self) -> int:
        """Number of its records that kill or hang a worker."""
        return sum(word in CRASHERS for word in self.poison.values())

    @property
    def cost_s(self) -> float:
        """About how long one worker takes for the job (seconds)."""
        if self.hardware == "slow":
            return self.records * sum(self.words) / 2 / _SLOW_WORDS_PER_S
        return self.records / _QUICK_RECORDS_PER_S


@dataclass(frozen=True)
class Expected:
    """A job's expected results: vectors (NaN where a record must fail), error codes of those records, ids, cut texts.

    `tolerance` is the largest accepted difference of a vector's element. `cuts` is None where the cuts are unknown.
    `kept` holds each record's kept fields; it is None if the job keeps none. `tokens` are those of each record, 0 for a
    failed one; None if the job does not count them.
    """

    vectors: npt.NDArray[np.float32]
    codes: Mapping[int, ErrorCode]
    ids: Sequence[str | int | None]
    tolerance: float = 0.0
    cuts: Mapping[int, tuple[int, int]] | None = None
    kept: Sequence[Mapping[str, Any]] | None = None
    tokens: Sequence[int] | None = None


class Workload(Protocol):
    """Where jobs come from."""

    def plan(self, index: int) -> Plan | None:
        """The job with this number; None when there are no more jobs."""

    def special(self, kind: str, index: int) -> Plan | None:
        """A job of a kind that a fault needs; None where this workload has no such kind."""

    def items(self, plan: Plan) -> list[Item]:
        """A job's records."""

    def expected(self, plan: Plan) -> Expected:
        """A job's expected results."""


class DummyWorkload:
    """An endless supply of jobs for the dummy backend."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._kinds = {kind: share for kind, share in _KINDS.items() if options.crashers or kind != "crasher"}
        # With a long lease each death costs minutes: only a few records may kill, or the run never settles.
        if options.lease > 10 and "crasher" in self._kinds:
            self._kinds["crasher"] = 4
        if options.records is not None:
            self._kinds |= _HUGE
        self._planned = 0

    def plan(self, index: int) -> Plan | None:
        if self._options.records is not None and self._planned >= self._options.records:
            return None
        rng = random.Random(f"{self._options.seed} job {index}")
        [kind] = rng.choices(list(self._kinds), list(self._kinds.values()))
        plan = self._plan(index, kind, rng)
        self._planned += plan.records
        return plan

    def special(self, kind: str, index: int) -> Plan:
        rng = random.Random(f"{self._options.seed} {kind} job {index}")
        plan = Plan(
            index=index,
            key=f"chaos {self._options.seed} {kind} {index}",
            kind=kind,
            model=DUMMY,
            hardware=rng.choice(("slow", "quick")),
            ttl_s=self._options.ttl,
            by=rng.choice(("library", "command")),
        )
        return replace(plan, **_SPECIAL[kind](rng))

    def items(self, plan: Plan) -> list[Item]:
        return _items(plan, self._options.seed)

    def expected(self, plan: Plan) -> Expected:
        return _expected(plan, self.items(plan))

    def _plan(self, index: int, kind: str, rng: random.Random) -> Plan:
        classes = {"slow": 3, "quick": 2, GUARDED: 2 if self._options.supervised else 0}
        [hardware] = ["quick"] if kind == "huge" else rng.choices(list(classes), list(classes.values()))
        words = _LENGTHS[0] if kind == "huge" else rng.choice(_LENGTHS)
        low, high = _SIZES.get(kind, (0, 0))
        if hardware == "slow":
            high = max(low, min(high, int(_LONGEST_S * _SLOW_WORDS_PER_S / (sum(words) / 2))))
        records = rng.randint(min(low, high), high)
        poison: dict[int, str] = {}
        if kind == "poison":
            poison = {rng.randrange(records): rng.choice(list(SOFT_POISON)) for _ in range(rng.randint(1, 6))}
        elif kind == "crasher":
            poison = {rng.randrange(records): rng.choice(list(CRASHERS)) for _ in range(rng.randint(1, 2))}
            if rng.random() < 0.5:
                poison.setdefault(rng.randrange(records), rng.choice(list(SOFT_POISON)))
        links = {NEAR: 5, PROXY: 3, GATEWAY: 2 if self._options.gateway and kind != "huge" else 0}
        [link] = rng.choices(list(links), list(links.values()))
        sizes = [size for size in (1, 3, 7, 16, 50, 128) if records <= size * _MOST_CHUNKS]
        return Plan(
            index=index,
            key=f"chaos {self._options.seed} {index}",
            kind=kind,
            model=DUMMY,
            hardware=hardware,
            ttl_s=self._options.ttl,
            records=records,
            chunk_size=rng.choice([*sizes, None]),
            words=words,
            ids=rng.choice(("none", "field", "argument")),
            long=rng.choice(("cut", "cut", "error")),
            normalize=rng.random() < 0.85,
            prompt=rng.choice((None, None, None, "query: ")),
            poison=poison,
            by=rng.choice(("library", "library", "command")) if records else "library",  # no command takes no records
            link=link,
            seconds_per_record=rng.choice((0.0, 0.0, 1.0, 4.0)) / max(records, 1),
            keep=rng.choice(((), KEPT)),
            count_tokens=rng.random() < 0.5,
            tenant="default" if link == GATEWAY else rng.choice(("default", "default", "a", "b")),
            lane=rng.choice(("normal", "normal", "interactive", "background")),
        )


def _cancelled(rng: random.Random) -> dict[str, Any]:
    """A job long enough to be cancelled while it runs."""
    return {
        "hardware": "slow",
        "records": rng.randint(800, 3000),
        "chunk_size": rng.choice((16, 64)),
        "words": (10, 30),
        "link": PROXY if rng.random() < 0.3 else NEAR,
        "by": "library",
        "seconds_per_record": rng.choice((0.0, 0.0005)),
    }


def _cancelled_full(rng: random.Random) -> dict[str, Any]:
    """A job whose producer waits for room after each chunk."""
    return {**_cancelled(rng), "link": NEAR, "by": rng.choice(("library", "command")), "high_water": 2000}


def _budget(rng: random.Random) -> dict[str, Any]:
    """A job with an error budget. Some budgets run out while the producer still submits, some later, some just not."""
    records = rng.randint(60, 1200)
    poison = {rng.randrange(records): rng.choice(list(SOFT_POISON)) for _ in range(rng.randint(4, 12))}
    numbers = (0, 1, len(poison) // 2, len(poison) - 1, len(poison))
    shares = ("0%", f"{100 * len(poison) / records / 2:.3f}%", "50%")
    return {
        "records": records,
        "chunk_size": rng.choice((7, 16, 50)),
        "words": (4, 30),
        "poison": poison,
        "max_errors": rng.choice((*numbers, *shares)),
        "blemishes": rng.random() < 0.3,
        "link": rng.choice((NEAR, FAR)),
        "seconds_per_record": rng.choice((0.0, 2.0 / records)),
    }


def _budget_last(rng: random.Random) -> dict[str, Any]:
    """The budget is spent by the last chunk, and that may be done before a producer far away can say that it was."""
    size, chunks = rng.choice((1, 2, 8)), rng.randint(1, 4)
    return {
        "hardware": "quick",
        "records": size * chunks,
        "chunk_size": size,
        "poison": {size * chunks - 1: rng.choice(list(SOFT_POISON))},
        "max_errors": rng.choice((0, 0, "0%")),
        "blemishes": False,
        "link": FAR,
    }


def _budget_full(rng: random.Random) -> dict[str, Any]:
    """A small first chunk spends the budget while large chunks wait and the producer waits for room."""
    size = 16
    return {
        "hardware": "slow",
        "records": size * rng.randint(6, 20),
        "chunk_size": size,
        "words": (30, 60),
        "short_head": size,
        "poison": {rng.randrange(size): rng.choice(list(SOFT_POISON))},
        "max_errors": 0,
        "blemishes": False,
        "high_water": 6000,
    }


def _slowly_submitted(rng: random.Random) -> dict[str, Any]:
    """A moment before it has all its records it has most of them; some of them wait still when it has all."""
    records = rng.randint(150, 300)
    return {
        "hardware": "slow",
        "records": records,
        "chunk_size": rng.choice((3, 7)),
        "words": (50, 80),
        "by": "library",
        "blemishes": False,
        "seconds_per_record": rng.uniform(2.0, 3.0) / records,
    }


def _retried(rng: random.Random) -> dict[str, Any]:
    """Some records in several chunks fail, and are there to be retried with their kept fields."""
    size, chunks = rng.choice((3, 7, 16)), rng.randint(2, 8)
    poison = {rng.randrange(size * chunks): rng.choice(list(SOFT_POISON)) for _ in range(rng.randint(1, 5))}
    return {"hardware": "quick", "records": size * chunks, "chunk_size": size, "poison": poison, "keep": KEPT}


def _guarded(rng: random.Random) -> dict[str, Any]:
    """Workers of `embedctl up` die of some of its records."""
    records = rng.randint(40, 300)
    poison = {rng.randrange(records): rng.choice(list(SOFT_POISON))}
    poison |= {rng.randrange(records): rng.choice(list(CRASHERS)) for _ in range(rng.randint(1, 2))}
    return {"hardware": GUARDED, "records": records, "chunk_size": rng.choice((3, 7, 16)), "poison": poison}


def _killer(rng: random.Random) -> dict[str, Any]:
    """One of several jobs of a tenant, each with one chunk and a text that kills."""
    word = rng.choice(("crash-tokenizer", "crash-encoder", "kill-encoder"))
    return {
        "hardware": GUARDED,
        "records": 4,
        "poison": {rng.randrange(4): word},
        "tenant": KILLERS,
        "blemishes": False,
    }


def _beside(rng: random.Random) -> dict[str, Any]:
    """A job of another tenant that waits for the same workers."""
    return {"hardware": GUARDED, "records": 900, "chunk_size": 3, "blemishes": False}


_SPECIAL: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "cancelled": _cancelled,
    "cancelled-full": _cancelled_full,
    "budget": _budget,
    "budget-last": _budget_last,
    "budget-full": _budget_full,
    "retried": _retried,
    "slowly": _slowly_submitted,
    "guarded": _guarded,
    "killer": _killer,
    "beside": _beside,
}


def _items(plan: Plan, seed: int) -> list[Item]:
    rng = random.Random(f"{seed} texts {plan.index}")
    items: list[Item] = []
    for position in range(plan.records):
        text: str | None = _text(plan, rng, position)
        kind = rng.random()
        if plan.blemishes and position not in plan.poison:
            if kind < 0.02 and position:
                text = items[rng.randrange(position)]["text"]  # an exact duplicate
            elif kind < 0.03:
                text = " ".join(["long", *(f"w{rng.randrange(5000)}" for _ in range(rng.randint(255, 330)))])
            elif kind < 0.033:
                text = rng.choice(("", "  ", None))
        item: Item = {"text": text}
        if plan.ids != "none":
            # The ids of a job have one type: whole numbers in one job of three.
            item["id"] = rng.choice((position, 7) if plan.index % 3 == 0 else (f"id-{position}", "again"))
        if plan.keep:
            item |= {"title": f"Title {position}", "of": {"position": position, "tags": ["ü", None, position / 8]}}
        items.append(item)
    return items


def _text(plan: Plan, rng: random.Random, position: int) -> str:
    words = [
        f"w{rng.randrange(5000)}" for _ in range(rng.randint(*((1, 4) if position < plan.short_head else plan.words)))
    ]
    # The number tells apart texts that chance drew alike: only intended duplicates are duplicates.
    words.append(f"n{position}")
    if position in plan.poison:
        words.insert(rng.randrange(min(5, len(words))), plan.poison[position])
    return " ".join(words)


def _expected(plan: Plan, items: Sequence[Item]) -> Expected:
    backend = DummyBackend(dim=DIM)
    texts = [item["text"] for item in items]
    codes: dict[int, ErrorCode] = {}
    cuts: dict[int, tuple[int, int]] = {}
    vectors = np.full((len(texts), DIM), np.nan, np.float32)
    tokens = backend.tokenize([text or "" for text in texts], plan.prompt)
    for position, text in enumerate(texts):
        code = _code(text)
        if code is None and tokens.lost[position]:
            if plan.long == "error":
                code = ErrorCode.TOO_LONG
            else:
                cuts[position] = (int(tokens.lengths[position]), int(tokens.lost[position]))
        if code is not None:
            codes[position] = code
    good = np.array([position for position in range(len(texts)) if position not in codes], np.int64)
    if len(good):
        vectors[good] = backend.finish(backend.forward(tokens, good), normalize=plan.normalize)
    kept = [{name: item.get(name) for name in plan.keep} for item in items] if plan.keep else None
    counts = [0 if at in codes else int(tokens.lengths[at]) for at in range(len(texts))] if plan.counts else None
    return Expected(vectors, codes, _labels(items), cuts=cuts, kept=kept, tokens=counts)


def _code(text: str | None) -> ErrorCode | None:
    if text is None:
        return ErrorCode.NOT_TEXT
    if not text.strip():
        return ErrorCode.EMPTY
    # A duplicate of a poison text is poison too, so the text decides, not the position.
    return next((POISON[word] for word in text.split() if word in POISON), None)


def _labels(items: Sequence[Item]) -> list[str | int | None]:
    return [item.get("id") for item in items]

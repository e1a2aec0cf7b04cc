"""What is asked of every system: infinity's requests of long texts; over HTTP, single texts and many callers too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from embedctl_bench.measuring.sampling import REPEATS
from embedctl_bench.texts.words import REQUESTS, TEXTS, draw_words, request_texts

#: A machine with this number of CPUs runs the whole shape in every round.
_LARGE_MACHINE = 16
_ROUNDS, _QUICK_ROUNDS = 3, 2
#: Tokens of single texts, and how often each is asked for in a round.
LENGTHS = (8, 32, 128, 256)
_SINGLES, _QUICK_SINGLES = 40, 5
#: Single texts have so many times the rounds of other loads: a machine's speed changes within minutes by more than the
#: milliseconds that they tell apart.
_TIMES_ROUNDS = 5
#: Tokens that BERT adds to a text.
_SPECIAL = 2
_CALLERS, _MOST_TEXTS = 64, 8
_WORDS_OF_CALLERS = (10, 30)
_ASKED, _QUICK_ASKED = 512, 64


@dataclass(frozen=True, slots=True)
class Load:
    """Requests.

    Attributes:
        words: for people.
        callers: how many send a request when their last one is answered; 0: all requests are made at once.
    """

    name: str
    words: str
    requests: tuple[tuple[str, ...], ...]
    callers: int = 0

    @property
    def texts(self) -> int:
        """Texts of all requests."""
        return sum(map(len, self.requests))

    @property
    def is_single(self) -> bool:
        """Whether a caller alone asks for one text after the other."""
        return self.callers == 1


def _large(name: str, words: str, sizes: tuple[int, ...]) -> Load:
    """Requests of so many long texts, all in flight at once: infinity's benchmark."""
    return Load(name, words, tuple(tuple(request_texts(number, size)) for number, size in enumerate(sizes)))


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A load that is run in rounds, and perhaps another that is run once, by ours and the fastest other systems.

    Attributes:
        repeats: how often the rounds of a noisy system are repeated at most.
        quick: whether loads are small.
    """

    load: Load
    rounds: int
    once: Load | None = None
    repeats: int = REPEATS
    quick: bool = False

    @classmethod
    def of(cls, cpus: int, *, quick: bool) -> RequestPlan:
        """The plan for a number of CPUs."""
        if quick:
            load = _large("quick", "requests of 3 texts", (3,) * REQUESTS)
            return cls(load, _QUICK_ROUNDS, repeats=0, quick=True)
        whole = _large("whole", "the whole shape", (TEXTS,) * REQUESTS)
        if cpus >= _LARGE_MACHINE:
            return cls(whole, _ROUNDS)
        # 255 texts in all: 25 and 26 in alternation.
        return cls(_large("tenth", "a tenth of the shape", (25, 26) * (REQUESTS // 2)), _ROUNDS, whole)

    def over_http(self) -> Iterator[tuple[Load, int]]:
        """The loads over HTTP, and how often each server gets each."""
        singles = _QUICK_SINGLES if self.quick else _SINGLES
        for tokens in LENGTHS:
            draw = random.Random(tokens)
            texts = tuple((draw_words(draw, tokens - _SPECIAL),) for _ in range(singles))
            rounds = self.rounds * (1 if self.quick else _TIMES_ROUNDS)
            yield Load(f"one-{tokens}", f"one text of {tokens} tokens", texts, 1), rounds
        draw = random.Random(0)
        few = tuple(
            tuple(draw_words(draw, draw.randint(*_WORDS_OF_CALLERS)) for _ in range(draw.randint(1, _MOST_TEXTS)))
            for _ in range(_QUICK_ASKED if self.quick else _ASKED)
        )
        yield Load("callers", f"{_CALLERS} callers of 1 to {_MOST_TEXTS} texts", few, _CALLERS), self.rounds
        yield self.load, self.rounds
        if self.once:
            yield self.once, 1

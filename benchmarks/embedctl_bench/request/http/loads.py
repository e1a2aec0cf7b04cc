"""What is asked of every server: single texts one after the other, large requests, and many callers of a few texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from embedctl_bench.request.results import RequestPlan
from embedctl_bench.request.texts import draw_words, request_texts

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
    """Requests to a server.

    Attributes:
        words: for people.
        in_flight: how many callers there are; each sends a request when its last one is answered.
    """

    name: str
    words: str
    in_flight: int
    requests: tuple[tuple[str, ...], ...]

    @property
    def texts(self) -> int:
        """Texts of all requests."""
        return sum(map(len, self.requests))

    @property
    def is_single(self) -> bool:
        """Whether a caller alone asks for one text after the other."""
        return self.in_flight == 1

    def rounds(self, plan: RequestPlan, *, quick: bool) -> int:
        """How often each server gets it."""
        return plan.rounds * (_TIMES_ROUNDS if self.is_single and not quick else 1)


def loads(plan: RequestPlan, *, quick: bool) -> Iterator[Load]:
    """The loads of each round."""
    for tokens in LENGTHS:
        draw = random.Random(tokens)
        texts = tuple((draw_words(draw, tokens - _SPECIAL),) for _ in range(_QUICK_SINGLES if quick else _SINGLES))
        yield Load(f"one-{tokens}", f"one text of {tokens} tokens", 1, texts)
    draw = random.Random(0)
    few = tuple(
        tuple(draw_words(draw, draw.randint(*_WORDS_OF_CALLERS)) for _ in range(draw.randint(1, _MOST_TEXTS)))
        for _ in range(_QUICK_ASKED if quick else _ASKED)
    )
    yield Load("callers", f"{_CALLERS} callers of 1 to {_MOST_TEXTS} texts", _CALLERS, few)
    yield large(plan.shape.sizes)


def large(sizes: tuple[int, ...]) -> Load:
    """Requests of long texts, all in flight at once: infinity's benchmark."""
    requests = tuple(tuple(request_texts(number, size)) for number, size in enumerate(sizes))
    of = " or ".join(map(str, sorted(set(sizes))))
    return Load(f"large-{max(sizes)}", f"{len(sizes)} requests of {of} long texts in flight", len(sizes), requests)

"""Texts of common English words drawn at random, the same on every machine.

They are those of infinity's benchmark, in its shape: requests of 255 long texts, about 115,000 tokens each, where a
request of fewer texts has the first texts of the whole request; and texts of an exact number of tokens.
"""

from __future__ import annotations

import random

from embedctl_bench.peers.models import Model
from embedctl_config.errors import ModelError

#: Texts in a request, characters in a text, and requests in flight.
TEXTS, SHORTEST, LONGEST, REQUESTS = 255, 2670, 2973, 10

#: Each is one token of BERT's English vocabularies. They are as long as words of prose: about 450 tokens a text.
_WORDS = """
    the and is for by be if can have its not one own that two were will above active again almost also amount answer
    article become behind better blood book bring building capital cause century change choice city climate cold
    color compare condition continue country create danger degree design develop discover double earth education
    energy enter evening example expect factor farm field find food forest freedom garden group happen height
    however image include industry interest justice knowledge large leave library listen long manner master maybe
    member middle minister moment morning move nation never nothing object often order page parent patient perfect
    person place plant popular power present price process project provide quality quick reach record remain require
    return round school second service share signal simple small sometimes space spirit stage still street structure
    subject suffer surface teacher thing thought together tradition tree understand valley village water west while
    within wonder year
""".split()  # noqa: SIM905  (as a list it would be pages long)


def request_texts(number: int, texts: int = TEXTS) -> list[str]:
    """The first texts of a request."""
    draw = random.Random(number)
    return [_text(draw) for _ in range(texts)]


def draw_words(draw: random.Random, words: int) -> str:
    """A text of so many words, each of which is one token of BERT's English vocabularies."""
    return " ".join(_WORDS[_between(draw, 0, len(_WORDS) - 1)] for _ in range(words))


def exact_requests(model: Model, tokens: int, batch: int, count: int) -> list[list[str]]:
    """`count` requests of `batch` texts with exactly `tokens` tokens of a model each, special tokens included: random
    words of one token. Unavailable says that it has no fast tokenizer, ModelError that no text has this length."""
    # A word may have other tokens at the beginning of a text than within it, so every text begins with the same.
    base, *lengths = model.lengths([_WORDS[0], *(f"{_WORDS[0]} {word}" for word in _WORDS)])
    words = [word for word, length in zip(_WORDS, lengths, strict=True) if length == base + 1]
    draw = random.Random(f"{tokens} {batch}")
    texts = [" ".join([_WORDS[0], *draw.choices(words or _WORDS, k=tokens - base)]) for _ in range(batch * count)]
    if wrong := set(model.lengths(texts)) - {tokens}:
        raise ModelError(f"model {model.name!r}: texts meant to have {tokens} tokens have {sorted(wrong)}")
    return [texts[at : at + batch] for at in range(0, len(texts), batch)]


def _text(draw: random.Random) -> str:
    """Words that are as long together as a text of infinity's."""
    length = _between(draw, SHORTEST + max(map(len, _WORDS)) + 1, LONGEST)
    return draw_words(draw, LONGEST // 2)[:length].rpartition(" ")[0]


def _between(draw: random.Random, least: int, most: int) -> int:
    """A whole number, by `random()`: no other function is promised to be the same in every Python."""
    return least + int(draw.random() * (most - least + 1))

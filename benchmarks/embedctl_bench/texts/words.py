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
    the of and in to is it on for as at by an or be we he if so but can had has have her his its may new not now old
    one our out own see she that they this two use was were what when will you about above across action active actual
    after again against agree almost along already also although always amount animal another answer appear around
    article attention average become before begin behind believe below better between beyond blood board body book
    border bridge bring broken brother building business camera capital carry castle cause center central century
    certain chance change chapter charge choice church circle city claim clear climate close coast cold collect
    college color common company compare complete concern condition consider contain continue control corner country
    course cover create culture current danger daughter decide degree depend describe design despite detail develop
    difference direct discover distance doctor double during early earth economy edge education effect effort energy
    engine enough enter entire escape evening event every example except exist expect explain express factor family
    famous farm father feature field figure final find floor follow food force foreign forest form forward freedom
    friend from garden general ground group growth guide happen heart heavy height history house however human hundred
    image important improve include increase indeed industry inside instead interest island journey justice keep
    kitchen knowledge labor language large later learn leave letter level library light limit listen little local long
    machine major manner many market master material matter maybe measure medical member memory method middle military
    million minister minute modern moment money month morning mother mountain move museum music nation nature nearly
    never normal north nothing notice number object occur office often open opinion order other outside page paint
    paper parent party passage patient pattern people perfect perhaps period person picture piece place plain planet
    plant point policy popular position possible power practice prepare present pressure prevent price private problem
    process produce program project promise protect provide public purpose quality quarter question quick quite rather
    reach reason recent record region relate remain remember report require research result return river road round
    rule safety school science season second section serve service several shape share short should signal silver
    similar simple since single small social society sometimes source south space speak special spirit spring square
    stage standard station still stone story street strength strong structure student study subject success sudden
    suffer summer support surface system table teacher temple theory thing think though thought through today together
    toward trade tradition train travel tree trouble under understand until usual valley value various village visit
    voice water weather weight west whether which while whole winter within without woman wonder world write year
    young
""".split()  # noqa: SIM905  (as a list it would be pages long)


def request_texts(number: int, texts: int = TEXTS) -> list[str]:
    """The first texts of a request."""
    draw = random.Random(number)
    return [_text(draw) for _ in range(texts)]


def draw_words(draw: random.Random, words: int) -> str:
    """A text of so many words, each of which is one token of BERT's English vocabularies."""
    return " ".join(_WORDS[_between(draw, 0, len(_WORDS) - 1)] for _ in range(words))


class ExactTexts:
    """Texts with an exact number of a model's tokens, special tokens included: random words of one token each.

    Args:
        model: with a fast tokenizer.

    Raises:
        Unavailable: it has none.
        ModelError: it knows no word as one token.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        # A word may have other tokens at the beginning of a text than within it, so every text begins with the same.
        base, *lengths = model.lengths([_WORDS[0], *(f"{_WORDS[0]} {word}" for word in _WORDS)])
        self._base = base
        self._words = [word for word, length in zip(_WORDS, lengths, strict=True) if length == base + 1]
        if not self._words:
            raise ModelError(f"model {model.name!r}: its tokenizer cuts every word, so no text can be given a length")

    def requests(self, tokens: int, batch: int, count: int) -> list[list[str]]:
        """`count` requests of `batch` texts with `tokens` tokens each.

        Raises:
            ModelError: no text can be that short.
        """
        if tokens < self._base:
            raise ModelError(f"model {self._model.name!r}: no text has {tokens} tokens, {self._base} is the least")
        draw = random.Random(f"{tokens} {batch}")
        more = tokens - self._base
        texts = [" ".join([_WORDS[0], *draw.choices(self._words, k=more)]) for _ in range(batch * count)]
        if wrong := set(self._model.lengths(texts)) - {tokens}:
            raise ModelError(f"model {self._model.name!r}: texts meant to have {tokens} tokens have {sorted(wrong)}")
        return [texts[at : at + batch] for at in range(0, len(texts), batch)]


def _text(draw: random.Random) -> str:
    """Words that are as long together as a text of infinity's."""
    length = _between(draw, SHORTEST + max(map(len, _WORDS)) + 1, LONGEST)
    return draw_words(draw, LONGEST // 2)[:length].rpartition(" ")[0]


def _between(draw: random.Random, least: int, most: int) -> int:
    """A whole number, by `random()`: no other function is promised to be the same in every Python."""
    return least + int(draw.random() * (most - least + 1))

"""Texts to measure with, the same every time: with an exact number of tokens, and real English sentences."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from hashlib import sha256
from pydoc_data.topics import topics

from embedctl_config.errors import ModelError
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import TEXTS

_WORD = re.compile(r"[a-z]+")
#: The first word of every text: a word may have other tokens at the beginning of a text than within it.
_FIRST = "the"
#: A sentence of prose. A text with one of these characters is code, a table or markup.
_SENTENCE = re.compile(r"[A-Z][^|=<>{}\[\]*]*[.!?]")
_SHORTEST, _LONGEST = 5, 60


class ExactTexts:
    """Texts with an exact number of a model's tokens, special tokens included: random words of one token each.

    Args:
        model: with a fast tokenizer.

    Raises:
        ModelError: it has none, or knows no word as one token.
    """

    def __init__(self, model: ModelFiles) -> None:
        from tokenizers import Tokenizer

        path = model.folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"model {model.name!r} has no {path.name}, which texts of an exact length are made with")
        self._name = model.name
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._base = self._count(_FIRST)
        found = dict.fromkeys(_WORD.findall(" ".join(TEXTS.values())))
        self._words = [word for word in found if self._count(f"{_FIRST} {word}") == self._base + 1]
        if not self._words:
            raise ModelError(f"model {model.name!r}: its tokenizer cuts every word, so no text can be given a length")

    def requests(self, tokens: int, batch: int, count: int) -> list[list[str]]:
        """`count` requests of `batch` texts with `tokens` tokens each.

        Raises:
            ModelError: no text can be that short.
        """
        if tokens < self._base:
            raise ModelError(f"model {self._name!r}: no text has {tokens} tokens, {self._base} is the least")
        draw = random.Random(f"{tokens} {batch}")
        texts = [" ".join([_FIRST, *draw.choices(self._words, k=tokens - self._base)]) for _ in range(batch * count)]
        if wrong := {self._count(text) for text in texts} - {tokens}:
            raise ModelError(f"model {self._name!r}: texts meant to have {tokens} tokens have {sorted(wrong)}")
        return [texts[at : at + batch] for at in range(0, len(texts), batch)]

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids)


def sentences(count: int) -> list[str]:
    """Distinct sentences of Python's language reference, which comes with Python, in a fixed random order.

    Raises:
        ModelError: this Python's holds fewer.
    """
    found: dict[str, None] = {}
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(paragraph.split())):
                if _SHORTEST <= len(sentence.split()) <= _LONGEST and _SENTENCE.fullmatch(sentence):
                    found[sentence] = None
    ordered = list(found)
    random.Random(0).shuffle(ordered)
    if len(ordered) < count:
        raise ModelError(f"this Python's language reference has {len(ordered)} sentences, and {count} are needed")
    return ordered[:count]


def digest(texts: Sequence[str]) -> str:
    """A digest of texts: equal for equal texts."""
    return sha256("\n".join(texts).encode()).hexdigest()[:12]

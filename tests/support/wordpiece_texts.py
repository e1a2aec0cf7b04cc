"""Texts that look for a difference between two WordPiece tokenizers."""

from __future__ import annotations

import string
from random import Random

from tokenizers import Tokenizer

#: Marks that combine, white space, characters without width, of many bytes, in capitals, of Chinese, and a replacement.
_ODD = (
    "\u2019\u201c\u2014\u2026\u00e9\u00df\u0130\u03a3\u0301\u0327\u0345\u200b\u200d\u2060\ufeff\u00ad\u00a0\u3000\u2028\u0085"
    "\u1680\u202f\u4e2d\u6587\uf900\u3042\uac00\u1100\u1161\u0e33\u0939\u093f\U0001f680\U00020000\ufffd\u212b\ufb01\u00bd\u0660"
)


class Texts:
    """Random texts for a tokenizer: its pieces, whole, cut and glued together, and everything that may go wrong.

    Args:
        seed: equal seeds give equal texts.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random = Random(seed)
        self._pieces = [piece.removeprefix("##") for piece in tokenizer.get_vocab()]
        self._added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]

    def batch(self, count: int) -> list[str]:
        """So many texts, about a third of them with characters that are not printable ASCII."""
        return [self._text() for _ in range(count)]

    def _text(self) -> str:
        random = self._random
        kinds = [self._piece, self._piece, self._letters, self._marks, self._space]
        kinds += random.choice([[], [], [self._added_token], [self._code], [self._odd]])
        words = [random.choice(kinds)() for _ in range(random.choice([0, 1, 2, 5, 12, 40]))]
        return random.choice(["", " ", " ", " "]).join(words)

    def _piece(self) -> str:
        piece = "".join(self._random.choices(self._pieces, k=self._random.choice([1, 1, 1, 2, 5])))
        return self._random.choice([piece, piece, piece.upper(), piece.title()])

    def _letters(self) -> str:
        size = self._random.choice([1, 2, 3, 7, 20, 99, 100, 101, 230])
        letters = self._random.choice([string.ascii_letters, string.digits, "aAeE", string.ascii_lowercase])
        return "".join(self._random.choices(letters, k=size))

    def _marks(self) -> str:
        return "".join(self._random.choices(string.punctuation, k=self._random.choice([1, 1, 3, 30])))

    def _space(self) -> str:
        return "".join(self._random.choices(" \t\n\r", k=self._random.choice([1, 2, 9])))

    def _added_token(self) -> str:
        token = self._random.choice(self._added)
        token = self._random.choice([token, token, token.lower(), token.upper(), token.swapcase()])
        return token[: self._random.choice([None, None, -1, 1])]

    def _code(self) -> str:
        return chr(self._random.randrange(128))

    def _odd(self) -> str:
        random = self._random
        odd = random.choice(
            [random.choice(_ODD), chr(random.randrange(128, 0xD800)), chr(random.randrange(0xE000, 0x30000))]
        )
        return random.choice(["", self._letters(), self._added_token()]) + odd * random.choice([1, 1, 2, 30])

"""The tokens of words that are not printable ASCII, from the library `tokenizers`; recent ones are remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

from embedctl_workers.arrays.tokens import Ragged

#: Bytes of a word. A longer one is likely a sentence of a script without spaces, which never comes again.
LONGEST = 64
#: Words that are remembered: about 10 MB.
_MOST_WORDS = 65_536
#: New words that are looked up in one call: so many, and one more for so many that are known or come again in it.
_NEW_WORDS, _PER_NEW_WORD = 64, 8


class OddWords:
    """Tokenises words by the library, which neither cuts nor pads. Threads may call it at the same time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[bytes, bytes] = {}

    def __call__(self, words: Sequence[bytes]) -> tuple[Ragged, Sequence[int]]:
        """The tokens of each word alone, int32, without special tokens; and which words have none because they are new.

        A word alone costs the library more than a word in a text, so not many new ones are looked up at a time, and few
        where words hardly come again. Words are in UTF-8, of at most `LONGEST` bytes, without white space of ASCII.
        """
        found = {word: self._known.get(word) for word in words}
        new_words = [word for word, ids in found.items() if ids is None]
        if missing := new_words[: _NEW_WORDS + (len(words) - len(new_words)) // _PER_NEW_WORD]:
            encodings = self._tokenizer.encode_batch_fast([word.decode() for word in missing], add_special_tokens=False)
            new = {word: np.array(each.ids, np.int32).tobytes() for word, each in zip(missing, encodings, strict=True)}
            self._remember(new)
            found |= new
        ids = [found[word] or b"" for word in words]
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(each) // np.int32().itemsize for each in ids], out=offsets[1:])
        left_out = len(missing) < len(new_words)
        return (
            Ragged(np.frombuffer(b"".join(ids), np.int32), offsets),
            [at for at, word in enumerate(words) if found[word] is None] if left_out else [],
        )

    def _remember(self, new: Mapping[bytes, bytes]) -> None:
        if len(self._known) + len(new) > _MOST_WORDS:
            self._known.clear()  # another thread holds what it found
        self._known.update(new)

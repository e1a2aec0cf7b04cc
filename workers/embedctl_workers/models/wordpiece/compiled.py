"""Calls into the library made from `wordpiece.c`, and the words that it leaves to the tokenizers' library."""

from __future__ import annotations

import ctypes
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from embedctl_workers.arrays.tokenizing import Cut
from embedctl_workers.arrays.tokens import Ragged, Rows
from embedctl_workers.models.wordpiece.rules import Rules

#: Bytes of a word. A longer one is likely a sentence of a script without spaces, which never comes again.
LONGEST = 64
#: Words that are remembered: about 10 MB.
_MOST_WORDS = 65_536
#: New words that are looked up in one call: so many, and one more for so many that are known or come again in it.
_NEW_WORDS, _PER_NEW_WORD = 64, 8
#: Classes of bytes, as in the C file; letters and digits have smaller ones.
_SPACE, _PUNCTUATION, _OTHER = 64, 65, 66
_EDGE = np.dtype([("key", np.uint32), ("child", np.uint32), ("id", np.int32)])
_LARGEST_TABLE = 26  # bits


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


class _Vocabulary(ctypes.Structure):
    """The C struct `vocabulary`."""

    _fields_ = (
        ("classes", ctypes.c_void_p),
        ("punctuation", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("longest", ctypes.c_int64),
        ("unknown", ctypes.c_int64),
        ("added", ctypes.c_void_p),
        ("added_at", ctypes.c_void_p),
        ("added_count", ctypes.c_int64),
        ("begins_added", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
        ("before_count", ctypes.c_int64),
        ("after_count", ctypes.c_int64),
    )


def load_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    library.fill.restype = library.odd_words.restype = ctypes.c_int64
    library.tokenise.restype = None
    return library


class CompiledWordPiece:
    """A WordPiece tokenizer for texts of ASCII words and a few others. Threads may call it at the same time.

    White space of ASCII ends a word, whatever the word holds: the normalizer and the pre-tokenizer look at one
    character at a time, and Unicode's decomposition never moves a mark over a space. So a word of other characters has
    the same tokens alone as in its text.

    `odd_words` knows the tokens of words that are not printable ASCII.
    """

    def __init__(self, library: ctypes.CDLL, rules: Rules, odd_words: OddWords) -> None:
        self._library, self._odd_words = library, odd_words
        self._special = len(rules.before) + len(rules.after)
        classes = _classes(rules)
        edges = _edges(library, rules, classes)
        added = [content.lower().encode() for content in rules.added]
        begins = np.zeros(256, np.uint8)
        for content in rules.added:
            begins[list((content[0].lower() + content[0].upper()).encode())] = 1
        arrays: Mapping[str, npt.NDArray[Any]] = {
            "classes": classes,
            "punctuation": _punctuation(rules),
            "edges": edges,
            "added": np.frombuffer(b"".join(added) or b"\0", np.uint8),
            "added_at": _offsets([len(content) for content in added]),
            "begins_added": begins,
            "before": np.array(rules.before, np.int32),
            "after": np.array(rules.after, np.int32),
        }
        self._arrays = arrays  # the struct points into them
        self._vocabulary = _Vocabulary(
            **{name: array.ctypes.data for name, array in arrays.items()},
            bits=len(edges).bit_length() - 1,
            longest=rules.longest,
            unknown=rules.unknown,
            added_count=len(added),
            before_count=len(rules.before),
            after_count=len(rules.after),
        )

    def __call__(self, texts: Sequence[str], most: int, *, keep_end: bool) -> Cut:
        """Tokenise texts; UnicodeEncodeError if one of them holds half of a surrogate pair.

        At most `most` tokens are kept of a text, special ones included: its begin, or its end if `keep_end`.
        """
        if most <= self._special:
            return Cut(Ragged.of([[]] * len(texts)), np.full(len(texts), -1))
        encoded = [text.encode() for text in texts]
        text, offsets = b"".join(encoded), _offsets([len(each) for each in encoded])
        first, spans = np.empty(len(texts) + 1, np.int64), np.empty((len(text) // 2 + len(texts), 2), np.int64)
        lost = np.empty(len(texts), np.int64)  # -1: left out
        found = self._library.odd_words(
            text, *_at(offsets), *map(ctypes.c_int64, (len(texts), LONGEST)), *_at(first, spans, lost)
        )
        odd, new = self._odd_words([text[begin:end] for begin, end in spans[:found].tolist()])
        lost[np.searchsorted(first, new, side="right") - 1] = -1
        room = len(text) + len(odd.values) + self._special * len(texts)
        ids, rows = np.empty(room, np.int32), np.empty(len(texts) + 1, np.int64)
        self._library.tokenise(
            ctypes.byref(self._vocabulary),
            text,
            *_at(offsets),
            ctypes.c_int64(len(texts)),
            *_at(first, spans, odd.values, odd.offsets),
            *map(ctypes.c_int64, (most - self._special, keep_end)),
            *_at(ids, rows, lost),
        )
        return Cut(Ragged(ids[: rows[-1]].copy(), rows), lost)


def _classes(rules: Rules) -> npt.NDArray[np.uint8]:
    classes = np.full(256, _OTHER, np.uint8)
    classes[list(b" \t\n\r")] = _SPACE
    classes[list(string.punctuation.encode())] = _PUNCTUATION
    letters = string.digits + string.ascii_lowercase
    classes[list(letters.encode())] = np.arange(len(letters))
    upper = np.arange(10, 36) if rules.lowercase else np.arange(36, 62)
    classes[list(string.ascii_uppercase.encode())] = upper
    return classes


def _punctuation(rules: Rules) -> npt.NDArray[np.int32]:
    """The token of each byte that is a word of its own."""
    ids = np.full(256, rules.unknown, np.int32)
    for mark in string.punctuation:
        ids[ord(mark)] = rules.vocabulary.get(mark, rules.unknown)
    return ids


def _edges(library: ctypes.CDLL, rules: Rules, classes: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The trie of all pieces that words of letters and digits can have."""
    pieces: list[tuple[bytes, int, int]] = []
    for piece, number in rules.vocabulary.items():
        if _reachable(piece, rules):
            pieces.append((piece.encode(), number, 0))
        if piece.startswith(rules.prefix) and _reachable(rest := piece[len(rules.prefix) :], rules):
            pieces.append((rest.encode(), number, 1))
    text = b"".join(piece for piece, _, _ in pieces)
    offsets = _offsets([len(piece) for piece, _, _ in pieces])
    ids = np.array([number for _, number, _ in pieces], np.int32)
    roots = np.array([root for _, _, root in pieces], np.uint8)
    bits = 1
    while bits <= _LARGEST_TABLE:
        edges = np.empty(2**bits, _EDGE)
        used = library.fill(
            *_at(edges),
            ctypes.c_int64(bits),
            *_at(classes),
            text,
            *_at(offsets, ids, roots),
            ctypes.c_int64(len(pieces)),
        )
        if used >= 0:
            return edges
        bits += 1
    raise MemoryError(f"a vocabulary of {len(pieces)} pieces")


def _reachable(piece: str, rules: Rules) -> bool:
    return piece.isascii() and piece.isalnum() and not (rules.lowercase and piece != piece.lower())


def _offsets(lengths: Sequence[int]) -> Rows:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _at(*arrays: npt.NDArray[Any]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]

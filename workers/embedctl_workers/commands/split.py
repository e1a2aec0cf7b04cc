"""`python -m embedctl_workers.commands.split MODEL [--prompt-name=NAME]` says where texts that are too long are cut.

Each line of standard input is a JSON list of texts, each as `[before, text, after]`: what of it is cut, and what stands
around each of its pieces. Each is answered by a line: for each text, where its pieces begin and end (characters of
`text`). A text that fits is one piece, and so is one around which too much stands. The prompt is as for :func:`opened`.
It exits with 1 if something is missing.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from embedctl_config.errors import EmbedctlError, ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_config.loading import load_settings
from embedctl_config.outputs import Output

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROMPT = "--prompt-name="
#: A piece has room for at least so many tokens, or the text is left whole.
_LEAST_ROOM = 16
#: Where a text is best cut, the best first: after a paragraph, a line, a sentence, a word.
_ENDS = (
    re.compile(r"\n\s*\n\s*"),
    re.compile(r"\n\s*"),
    # With closing quotes and brackets; and as Chinese and Japanese end a sentence.
    re.compile(r"[.!?\u2026][\"'\u201d\u2019\u00bb)\]]*\s+|[\u3002\uff01\uff1f]+"),
    re.compile(r"\s+"),
)

#: Where a piece begins and ends.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TextModel:
    """A tokenizer that neither cuts nor pads, the most tokens of a text, special ones included, the dimensions of a
    vector (0 of a sparse one), and the prompt that stands before each text."""

    tokenizer: Tokenizer
    longest: int
    dim: int
    prompt: str

    def counts(self, texts: Sequence[str]) -> list[int]:
        """How many tokens texts have, special ones included."""
        return [len(each.ids) for each in self.tokenizer.encode_batch_fast(texts)]


def opened(name: str, flags: Sequence[str]) -> TextModel:
    """The model of this name. With `--prompt-name=NAME`, its prompt of that name stands before each text, or its
    default one if the name is empty; without, none. It ends the process if the model, its tokenizer or the prompt is
    missing."""
    try:
        from tokenizers import Tokenizer

        from embedctl_workers.models.facts import facts_of, prompt_named, transformer_of
        from embedctl_workers.models.files import find_folder

        folder = find_folder(name, load_settings().models.get(name, ModelEntry()))
        tokenizer = Tokenizer.from_file(str(transformer_of(folder) / "tokenizer.json"))
        named = next((each.removeprefix(_PROMPT) for each in flags if each.startswith(_PROMPT)), None)
        prompt = "" if named is None else prompt_named(folder, named)
        facts = facts_of(folder)
        if facts.longest_text is None or (facts.dimensions is None and Output.DENSE in facts.outputs):
            raise ModelError("its files do not say how long a text or a vector is")
    except (ImportError, OSError, KeyError, TypeError, ValueError, EmbedctlError) as error:
        sys.exit(f"the tokenizer of {name} can't be used here: {error}")
    # The tokenizer's file may ask for truncation and padding, and then the counts would be wrong.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextModel(tokenizer, facts.longest_text, facts.dimensions or 0, prompt)


def main() -> None:
    name, *flags = sys.argv[1:]
    model = opened(name, flags)
    for line in sys.stdin.buffer:
        texts = [(model.prompt + before, text, after) for before, text, after in json.loads(line)]
        print(json.dumps(split(model, texts)), flush=True)  # noqa: T201


def split(model: TextModel, texts: Sequence[tuple[str, str, str]]) -> list[list[Span]]:
    """The pieces of texts with what stands around them: the fewest that end well, each short enough for the model."""
    found = [[(0, len(text))] for _, text, _ in texts]
    long = [at for at, count in enumerate(model.counts(list(map("".join, texts)))) if count > model.longest]
    around = model.counts([texts[at][0] + texts[at][2] for at in long])
    rooms = {at: model.longest - count for at, count in zip(long, around, strict=True)}
    rooms = {at: room for at, room in rooms.items() if room >= _LEAST_ROOM}
    encoded = model.tokenizer.encode_batch([texts[at][1] for at in rooms], add_special_tokens=False)
    begins = {at: [begin for begin, _ in each.offsets] for at, each in zip(rooms, encoded, strict=True)}
    while rooms:
        for at, room in rooms.items():
            found[at] = _pieces(texts[at][1], begins[at], room)
        rooms = {at: room - over for at, room, over in _too_long(model, texts, found, rooms) if room > over}
    return found


def _too_long(
    model: TextModel, texts: Sequence[tuple[str, str, str]], found: Sequence[Sequence[Span]], rooms: dict[int, int]
) -> list[tuple[int, int, int]]:
    """Texts with a piece that has more tokens than in the whole, such as one cut within a word, and how many more."""
    of = [at for at in rooms for _ in found[at]]
    pieces = [texts[at][0] + texts[at][1][start:end] + texts[at][2] for at in rooms for start, end in found[at]]
    over: dict[int, int] = {}
    for at, count in zip(of, model.counts(pieces), strict=True):
        over[at] = max(over.get(at, 0), count - model.longest)
    return [(at, rooms[at], more) for at, more in over.items() if more > 0]


def _pieces(text: str, begins: Sequence[int], room: int) -> list[Span]:
    """Pieces of at most so many tokens, which begin at `begins`; without white space around them."""
    found = []
    start = 0
    while start < len(text):
        last = bisect_left(begins, start) + room
        end = len(text) if last >= len(begins) else _end(text, start, max(begins[last], start + 1))
        inside = text[start:end]
        if inside.strip():
            found.append((start + len(inside) - len(inside.lstrip()), start + len(inside.rstrip())))
        start = end
    return found


def _end(text: str, start: int, limit: int) -> int:
    """The best end of a piece, in the second half of what may be in it."""
    half = (start + limit + 1) // 2
    for pattern in _ENDS:
        if ends := [match.end() for match in pattern.finditer(text, half, limit)]:
            return ends[-1]
    return limit


if __name__ == "__main__":
    main()

"""Where texts that are too long are cut, by the tokenizer of a real model."""

from __future__ import annotations

import pytest

from embedctl_workers.commands.split import split
from embedctl_workers.commands.tokenizer import TextModel, opened
from tests.support.packages import need
from tests.support.passages import passages

PROSE = "\n\n".join(passages(60))


@pytest.fixture(scope="module")
def model() -> TextModel:
    need("tokenizers")
    return opened("all-MiniLM-L6-v2", ["--prompt-name="])


def pieces(model: TextModel, text: str, before: str = "", after: str = "") -> list[str]:
    (spans,) = split(model, [(before, text, after)])
    at = 0
    for start, end in spans:
        assert at <= start < end
        assert not text[at:start].strip(), "what is between pieces is white space"
        at = end
    assert not text[at:].strip()
    found = [text[start:end] for start, end in spans]
    assert max(model.counts([before + piece + after for piece in found])) <= model.longest
    return found


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        PROSE.replace("\n", " "),
        " ".join(f"w{n}" for n in range(5000)),
        "Unbroken" * 3000,
        "漢字の文章です。" * 500,
        "漢字" * 2000,
        "e\u0301\U0001f600" * 1500,
        f"{'a b ' * 400}{' ' * 5000}{'c d ' * 400}\n\n",
        "\ufdfa" * 400,  # 18 characters each, once they are normalised
    ],
    ids=["prose", "sentences", "words", "one word", "Japanese", "Chinese", "marks", "white space", "ligatures"],
)
def test_pieces_fit_and_hold_all_of_a_text(model: TextModel, text: str) -> None:
    for around in (("", ""), ("a title | ", " the end")):
        pieces(model, text, *around)


def test_a_text_is_cut_where_it_ends_well(model: TextModel) -> None:
    sentence = "The cat sat on the mat and looked at the weather. "
    assert all(piece.endswith(".") for piece in pieces(model, sentence * 100))
    paragraph = (sentence * 6).strip()
    assert set(pieces(model, "\n\n".join([paragraph] * 10))) == {
        f"{paragraph}\n\n{paragraph}\n\n{paragraph}",
        paragraph,
    }
    assert len(pieces(model, PROSE)) <= 1.5 * len(model.tokenizer.encode(PROSE).ids) / model.longest


def test_a_text_stays_whole_if_it_fits_or_has_no_room(model: TextModel) -> None:
    texts = [("", " fits \n", ""), ("", "", ""), ("title " * 250, "a text " * 200, ""), ("x ", "y " * 253, "")]
    assert split(model, texts) == [[(0, len(text))] for _, text, _ in texts]
    assert split(model, []) == []

"""Where texts that are too long are cut, by the tokenizer of a real model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from embedctl_config.hardware import ModelEntry
from embedctl_workers.commands.split import TextModel, opened, split
from embedctl_workers.models.files import find_folder
from tests.support.packages import need
from tests.support.passages import passages

PROSE = "\n\n".join(passages(60))


@pytest.fixture(scope="module")
def model() -> TextModel:
    need("tokenizers")
    return opened("all-MiniLM-L6-v2", ["--prompt-name="])


def test_a_tokenizer_may_be_in_the_folder_of_a_module(tmp_path: Path) -> None:
    need("tokenizers")
    source, inside = find_folder("all-MiniLM-L6-v2", ModelEntry()), tmp_path / "0_Transformer"
    inside.mkdir()
    for name in ("config.json", "tokenizer.json", "sentence_bert_config.json"):
        shutil.copy(source / name, inside)
    (inside / "model.safetensors").touch()
    module = {"idx": 0, "name": "0", "path": inside.name, "type": "sentence_transformers.models.Transformer"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    found = opened(str(tmp_path), [])
    assert (found.longest, found.counts(["a text"])) == (256, [4])


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

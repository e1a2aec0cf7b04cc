"""The compiled WordPiece tokenizer gives the library's tokens, exactly, or leaves the text to the library."""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from embedctl_workers.arrays.tokenizing import TextTokenizer
from embedctl_workers.arrays.tokens import Tokens
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import resolve_model
from embedctl_workers.models.gate_texts import TEXTS
from embedctl_workers.models.wordpiece import compiled, rules
from embedctl_workers.models.wordpiece import load as load_module
from embedctl_workers.models.wordpiece.compiled import CompiledWordPiece
from embedctl_workers.models.wordpiece.load import fast_tokenizer_for
from tests.support.tiny_models import Tiny, make_tokenizer

pytestmark = pytest.mark.needs("compiler")

#: The wanted tokenizers by name; the last has added tokens of every kind.
NAMES = ("cased", "uncased", "mpnet", "added", "MiniLM")
COLUMNS = ("input_ids", "token_type_ids", "attention_mask")

Pair = Callable[..., tuple[TextTokenizer, TextTokenizer]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def tokenizer_of(name: str) -> Tokenizer:
    if name == "MiniLM":
        return Tokenizer.from_file(str(resolve_model("all-MiniLM-L6-v2").folder / "tokenizer.json"))
    tokenizer = make_tokenizer(Tiny("mpnet" if name == "mpnet" else "bert", lower=name != "cased"))
    if name == "added":
        tokenizer.add_tokens(
            [
                AddedToken("<X>", lstrip=True, rstrip=True, normalized=True),
                AddedToken("@Name", single_word=True, normalized=True),
                AddedToken("##", normalized=False),
            ]
        )
    return tokenizer


@pytest.fixture(scope="module")
def pair(cache: Path) -> Pair:
    fast: dict[str, CompiledWordPiece] = {}

    def pair(
        name: str, max_tokens: int = 32, keep: Literal["left", "right"] = "left"
    ) -> tuple[TextTokenizer, TextTokenizer]:
        tokenizer = tokenizer_of(name)
        if name not in fast:
            found = fast_tokenizer_for(tokenizer, Host(1, cache))
            assert found is not None
            fast[name] = found
        library = TextTokenizer(tokenizer, max_tokens=max_tokens, columns=COLUMNS, keep=keep)
        return library, TextTokenizer(tokenizer, max_tokens=max_tokens, columns=COLUMNS, keep=keep, fast=fast[name])

    return pair


#: Marks that combine, white space, characters without width, of many bytes, in capitals, of Chinese, and a replacement.
ODD = (
    "\u2019\u201c\u2014\u2026\u00e9\u00df\u0130\u03a3\u0301\u0327\u0345\u200b\u200d\u2060\ufeff\u00ad\u00a0\u3000\u2028\u0085"
    "\u1680\u202f\u4e2d\u6587\uf900\u3042\uac00\u1100\u1161\u0e33\u0939\u093f\U0001f680\U00020000\ufffd\u212b\ufb01\u00bd\u0660"
)


def texts_for(tokenizer: Tokenizer, seed: int, count: int) -> list[str]:
    """Texts of the tokenizer's pieces, whole, cut and glued together, and of everything that may go wrong. A third
    of them has characters that are not printable ASCII."""
    random = Random(seed)
    pieces = [piece.removeprefix("##") for piece in tokenizer.get_vocab()]
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]

    def some(of: Sequence[str], *counts: int) -> str:
        return "".join(random.choices(of, k=random.choice(counts)))

    def cased(text: str) -> str:
        return random.choice([text, text, text.upper(), text.title(), text.lower()])

    usual: list[Callable[[], str]] = [
        lambda: cased(some(pieces, 1, 1, 2, 5)),
        lambda: some(random.choice([string.ascii_letters, string.digits, "aAeE"]), 1, 2, 7, 20, 99, 100, 101, 230),
        lambda: some(string.punctuation, 1, 1, 3, 30),
        lambda: some(" \t\n\r", 1, 2, 9),
    ]
    odd: list[Callable[[], str]] = [
        lambda: cased(some(added, 1))[: random.choice([None, None, -1, 1])],
        lambda: chr(random.randrange(128)),
        lambda: some(ODD, 1) * random.choice([1, 1, 2, 30]),
        lambda: chr(random.choice([random.randrange(128, 0xD800), random.randrange(0xE000, 0x30000)])),
    ]

    def text() -> str:
        kinds = usual + random.choice([[], [], odd[:1], odd[1:2], odd[2:]])
        words = [random.choice(kinds)() for _ in range(random.choice([0, 1, 2, 5, 12, 40]))]
        return random.choice(["", " ", " ", " "]).join(words)

    return [text() for _ in range(count)]


def assert_equal(found: Tokens, expected: Tokens) -> None:
    for name in ("lengths", "lost"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), strict=True)
    assert list(found.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        np.testing.assert_array_equal(found.columns[name].values, column.values, strict=True)
        np.testing.assert_array_equal(found.columns[name].offsets, column.offsets, strict=True)
    assert (found.windows is None) == (expected.windows is None)


def compare(both: tuple[TextTokenizer, TextTokenizer], texts: Sequence[str]) -> None:
    library, fast = both
    assert_equal(fast(texts), library(texts))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keep"), [*((name, "left") for name in NAMES), ("added", "right")])
def test_random_texts_have_the_librarys_tokens(name: str, keep: Literal["left", "right"], pair: Pair) -> None:
    for seed, most in enumerate((3, 17, 128)):
        compare(pair(name, most, keep), texts_for(tokenizer_of(name), seed, 80))


@pytest.mark.parametrize("name", ["cased", "added"])
def test_any_text_has_the_librarys_tokens(name: str, pair: Pair) -> None:
    added = [token.content for token in tokenizer_of(name).get_added_tokens_decoder().values()]
    words = st.sampled_from([*added, "the", "\u0301", "\u3000", "\u4e2d"]) | st.text(max_size=6)

    @settings(max_examples=30)
    @given(st.lists(st.lists(words, max_size=8).map("".join), max_size=6))
    def check(texts: Sequence[str]) -> None:
        compare(pair(name, 9), texts)

    check()


@pytest.mark.parametrize("name", ["cased", "uncased", "added"])
def test_every_character_alone_within_and_between_words(name: str, pair: Pair) -> None:
    characters = [chr(code) for code in (*range(0x500), *range(0x2000, 0x2100), 0x4E00, 0xFEFF, 0x1F680)]
    texts = [text.replace("*", each) for each in characters for text in ("*", "the*word", "the *word", "the* word")]
    compare(pair(name), texts)
    compare(pair(name), ["the\u00a0word The\u0301 x\u0327\u0301y ", *texts[::-3]])


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_a_maximum_with_no_room_for_words_is_the_librarys_business(most: int, pair: Pair) -> None:
    found: list[object] = []
    for tokenizer in pair("uncased", most):
        try:
            found.append(tokenizer(["the word", ""]).columns["input_ids"].values.tolist())
        except BaseException as error:  # noqa: BLE001  (the library panics)
            found.append(type(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("keep", ["left", "right"])
def test_windows_are_the_librarys(keep: Literal["left", "right"], pair: Pair) -> None:
    library, fast = pair("MiniLM", 16, keep)
    texts = ["word", *TEXTS.values(), "[SEP] " * 40]
    expected, found = library(texts).windows, fast(texts).windows
    assert expected is not None
    assert found is not None
    np.testing.assert_array_equal(found().text, expected().text)
    np.testing.assert_array_equal(found().content, expected().content)
    assert_equal(found().tokens, expected().tokens)


def test_threads_share_a_tokenizer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_MOST_WORDS", 50)  # forgets all the time
    library, fast = pair("MiniLM")
    batches = [texts_for(tokenizer_of("MiniLM"), seed, 12) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for found, expected in zip(pool.map(fast, batches), map(library, batches), strict=True):
            assert_equal(found, expected)


def parts_of(name: str) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(tokenizer_of(name).to_str())
    return parts


def changed(path: str, value: object) -> Tokenizer:
    """The tokenizer of a BERT model with one other part."""
    parts = parts_of("uncased")
    *way, last = path.split(".")
    where = parts
    for name in way:
        where = where[name]
    where[last] = value
    return Tokenizer.from_str(json.dumps(parts))


def token(content: str) -> Mapping[str, object]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    return {"id": 900, "content": content, **plain}


def template(*parts: Mapping[str, Any]) -> Mapping[str, Any]:
    special = {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}}
    return {"type": "TemplateProcessing", "single": parts, "pair": [A, {"Sequence": {"id": "B", "type_id": 1}}]} | {
        "special_tokens": special
    }


A: Mapping[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
CLS: Mapping[str, Any] = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}

OTHERS: Mapping[str, tuple[str, object]] = {
    "no normalizer": ("normalizer", None),
    "several normalizers": ("normalizer", {"type": "Sequence", "normalizers": [parts_of("uncased")["normalizer"]]}),
    "no pre-tokenizer": ("pre_tokenizer", None),
    "no post-processor": ("post_processor", None),
    "another type of a special token": ("post_processor", template({"SpecialToken": {"id": "[CLS]", "type_id": 1}}, A)),
    "another type of a text": ("post_processor", template(CLS, {"Sequence": {"id": "A", "type_id": 1}})),
    "a template without a text": ("post_processor", template(CLS)),
    "an unknown token that is none": ("model.unk_token", "[NONE]"),
    "no character of a word": ("model.max_input_chars_per_word", 0),
    "an added word": ("added_tokens", [token("the")]),
    "an added space": ("added_tokens", [token("< x")]),
    "an added token beyond ASCII": ("added_tokens", [token("<\u00e9>")]),
    "another model": ("model", {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}),
}

SAME: Mapping[str, tuple[str, object]] = {
    "unclean": ("normalizer.clean_text", False),
    "accents": ("normalizer.strip_accents", False),
    "Chinese as it is": ("normalizer.handle_chinese_chars", False),
    "another prefix": ("model.continuing_subword_prefix", "t"),
    "short words": ("model.max_input_chars_per_word", 3),
    "nothing behind": ("post_processor", template(CLS, CLS, A)),
    "nothing around": ("post_processor", template(A)),
    "an added token": ("added_tokens", [token("[the]")]),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_tokenizer_is_the_librarys(what: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert fast_tokenizer_for(changed(*OTHERS[what]), Host(1, cache)) is None
    assert not caplog.records


@pytest.mark.parametrize("what", SAME)
def test_other_settings_are_followed(what: str, pair: Pair, cache: Path) -> None:
    pair("uncased")
    tokenizer = changed(*SAME[what])
    fast = fast_tokenizer_for(tokenizer, Host(1, cache))
    assert fast is not None
    texts = texts_for(tokenizer_of("uncased"), 10, 100)
    compare(
        (
            TextTokenizer(tokenizer, max_tokens=9, columns=COLUMNS),
            TextTokenizer(tokenizer, max_tokens=9, columns=COLUMNS, fast=fast),
        ),
        texts,
    )


def test_no_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert fast_tokenizer_for(tokenizer_of("uncased"), Host(1, tmp_path / "cache")) is None
    assert [(record.levelname, "no C compiler" in record.getMessage()) for record in caplog.records] == [("INFO", True)]


def test_a_compiled_tokenizer_that_differs_is_not_used(
    pair: Pair, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair("uncased")
    right = rules.rules_of

    def wrong(parts: Mapping[str, Any]) -> Any:
        parts["normalizer"]["lowercase"] = False
        return right(parts)

    monkeypatch.setattr(load_module, "rules_of", wrong)
    assert fast_tokenizer_for(tokenizer_of("uncased"), Host(1, cache)) is not None  # it was found right before
    monkeypatch.setattr(load_module, "noted", lambda *_: None)
    assert fast_tokenizer_for(tokenizer_of("uncased"), Host(1, cache)) is None
    assert "differs from the library" in caplog.text

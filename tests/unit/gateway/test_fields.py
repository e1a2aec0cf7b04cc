"""The fields of requests."""

from __future__ import annotations

import pytest

from embedctl_gateway.http.fields import texts_of
from embedctl_gateway.http.refusals import Refusal


@pytest.mark.parametrize("given", [[1], [[1, 2], [3]], [[]], ["text", [1]], [[1]] * 3000])
def test_token_ids_are_refused_in_the_same_words_however_they_are_nested(given: list[object]) -> None:
    with pytest.raises(Refusal) as refused:
        texts_of(given, "input")
    with pytest.raises(Refusal) as plain:
        texts_of([101], "input")
    assert "set check_embedding_ctx_length=False" in plain.value.message
    assert vars(refused.value) == vars(plain.value)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_type", "input")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([["text"]], r"^input\[0\] is a list, not a string$"),
        (["text", [1.5]], r"^input\[1\] is a list, not a string$"),
        ([True], r"^input\[0\] is true or false, not a string$"),
        (101, "^input is a number, not a string$"),
    ],
)
def test_what_is_neither_a_text_nor_token_ids_is_named(given: object, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        texts_of(given, "input")

"""Fields of rows by name and by path, and what is said about those that are missing."""

from __future__ import annotations

from typing import Any

import pytest

from embedctl.corpus.fields import MISSING, field_of, no_field

ROW = {
    "id": 1,
    "body": {"input": "a", "deep": {"er": "b"}, "x.y": "c"},
    "body.model": "m",
    "nothing": None,
    "list": [1],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", 1),
        ("body.input", "a"),
        ("body.deep.er", "b"),
        ("body.x.y", "c"),
        ("body.model", "m"),
        ("nothing", None),
    ],
)
def test_a_path_leads_into_objects_and_a_name_with_a_dot_wins(path: str, value: Any) -> None:
    assert field_of(ROW, path, MISSING) == value
    assert field_of({**ROW, path: "literal"}, path) == "literal"


@pytest.mark.parametrize("path", ["", ".", "body.", ".body", "body.none", "nothing.x", "list.0", "id.x", "none"])
def test_a_field_that_is_not_there_is_missing(path: str) -> None:
    assert field_of(ROW, path) is None
    assert field_of(ROW, path, MISSING) is MISSING


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none", "fields seen: body, body.model, id, list, nothing."),
        ("body.none", "fields seen in 'body': deep, input, x.y."),
        ("body.deep.none", "fields seen in 'body.deep': er."),
        ("list.0", "fields seen: body, body.model, id, list, nothing."),
    ],
)
def test_the_error_lists_the_fields_of_the_innermost_object(path: str, words: str) -> None:
    message = str(no_field(path, ROW, "c.jsonl, line 1"))
    assert message.startswith(f"c.jsonl, line 1: no field {path!r}; {words}")
    assert "--text-field" in message

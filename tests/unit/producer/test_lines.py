"""Lines of `.jsonl`, which may be printed on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from embedctl.destinations.jsonl import lines_of
from embedctl.destinations.unfinished import json_line
from embedctl.waiting.results import ChunkVectors
from tests.support.result_chunks import result_chunk, unit_vectors


def test_nothing_in_a_line_can_move_a_terminals_cursor_or_turn_its_text() -> None:
    bad = "a\x1b[2Jb\x7fc\x85d\u2028e\u202ef\u2066g\n"
    chunk = ChunkVectors(np.arange(1), [bad], np.zeros((1, 2), np.float32), [], [], kept=[{bad: bad}])
    (line,) = lines_of(chunk)
    assert line.decode().isprintable()
    assert json.loads(line) == {"position": 0, "id": bad, bad: bad, "embedding": [0, 0]}


def test_a_line_has_its_keys_in_order() -> None:
    kept: list[Mapping[str, Any]] = [{"title": "a", "n": 1}, {"title": "b", "n": None}]
    good, bad = lines_of(result_chunk(unit_vectors(2, 3), failed=[1], truncated=[0], kept=kept))
    assert list(json.loads(good)) == ["position", "id", "title", "n", "truncated", "embedding"]
    assert list(json.loads(bad)) == ["position", "id", "title", "n", "error"]


def test_a_line_that_orjson_refuses_is_written_all_the_same() -> None:
    deep: object = 1
    for _ in range(300):
        deep = [deep]
    kept: list[Mapping[str, Any]] = [{"n": 2**70}, {"n": deep}, {"n": "a\udce9"}]
    huge, nested, broken = lines_of(result_chunk(unit_vectors(3, 2), kept=kept))
    assert json.loads(huge)["n"] == 2**70
    assert json.loads(nested)["n"] == deep
    assert json.loads(broken.decode("utf-8", "surrogateescape"))["n"] == "a\udce9"


def test_every_unsafe_character_is_escaped_and_no_other() -> None:
    unsafe = {*range(0x7F, 0xA0), 0x2028, 0x2029, 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
    text = "".join(chr(code) for code in range(0x7F, 0xD800))
    line = json_line(text).decode()
    assert json.loads(line) == text
    assert {code for code in range(0x7F, 0xD800) if chr(code) not in line} == unsafe

"""Lines of `.jsonl`, which may be printed on a terminal."""

from __future__ import annotations

import json

import numpy as np

from embedctl.output.jsonl import lines_of
from embedctl.results import ChunkVectors


def test_nothing_in_a_line_can_move_a_terminals_cursor_or_turn_its_text() -> None:
    bad = "a\x1b[2Jb\x7fc\x85d\u2028e\u202ef\u2066g\n"
    chunk = ChunkVectors(np.arange(1), [bad], np.zeros((1, 2), np.float32), [], [], kept=[{bad: bad}])
    (line,) = lines_of(chunk)
    assert line.isprintable()
    assert json.loads(line) == {"position": 0, "id": bad, bad: bad, "embedding": [0, 0]}

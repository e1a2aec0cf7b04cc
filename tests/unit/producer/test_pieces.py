"""Pieces of texts, whose places another process says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from embedctl.corpus.pieces import pieces_of
from embedctl.corpus.records import Record
from embedctl_config.errors import InputError
from embedctl_config.wire import RecordKind


@pytest.mark.parametrize("answer", ["", "[[[0, "])
def test_a_process_that_ends_within_an_answer_is_an_error_with_its_reason(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nread asked\nprintf '%s' '{answer}'\necho 'it was killed' >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(InputError, match=r"--long split cuts texts .*: it was killed"):
        list(pieces_of([Record(RecordKind.TEXT, b"a text")], "m", None, None))

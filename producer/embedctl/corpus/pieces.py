"""Pieces: a text that is too long for its model becomes several records, each with its place in it.

The model's tokenizer says where a text is cut, in a child process, because a producer loads none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from embedctl.common.processes import running
from embedctl.corpus.kept import with_members
from embedctl.corpus.records import Record, Span, check_id
from embedctl.corpus.rows import Rows
from embedctl_config.errors import InputError, SettingsError
from embedctl_config.record_ids import as_text, to_json
from embedctl_config.wire import RecordKind

#: What is kept of a piece: the id of its record, or without one its position, and where it begins and ends in the
#: record's text (characters).
PIECE_FIELDS = ("parent", "start", "end")
#: Records that are cut together, and after how many bytes of text no more are.
_BATCH, _BATCH_BYTES = 256, 1024 * 1024


def check_splitting(rows: Rows) -> None:
    """SettingsError: of texts that are made so, it is not known what is cut."""
    if rows.template is not None and rows.text_fields.count(rows.text_field) != 1:
        raise SettingsError(
            f"--long split cuts the text field, and the template does not hold {{{rows.text_field}}} once: name "
            "another with --text-field"
        )


def prompt_flags(prompt: str | None, prompt_name: str | None) -> list[str]:
    """What the child processes that read texts are told of the prompt that stands before each: nothing if it is a text,
    which comes with each text."""
    return [] if prompt is not None else [f"--prompt-name={prompt_name or ''}"]


def pieces_of(
    records: Iterable[Record],
    model: str,
    prompt: str | None,
    prompt_name: str | None,
    done: Callable[[int, int], object] = lambda *_: None,
) -> Iterator[Record]:
    """Records as pieces: a piece's id is its parent's, `#` and its begin, so no two pieces have the same id, nor one
    the id of another place. `done` is called at the end, with how many records there were, and how many pieces.

    InputError: the model's tokenizer can't be used here, or the id of a piece is too long.
    """
    command = [sys.executable, "-m", "embedctl_workers.commands.split", model, *prompt_flags(prompt, prompt_name)]
    pipe = subprocess.PIPE
    count = pieces = 0
    with running(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        for record, spans in _divided(process, iter(records), prompt or ""):
            for start, end in spans:
                yield _piece(record, count, start, end)
            count, pieces = count + 1, pieces + len(spans)
    done(count, pieces)


def _divided(
    process: subprocess.Popen[bytes], records: Iterator[Record], prompt: str
) -> Iterator[tuple[Record, list[Span]]]:
    while batch := _batch(records):
        yield from zip(batch, _asked(process, batch, prompt), strict=True)


def _batch(records: Iterator[Record]) -> list[Record]:
    size, batch = 0, []
    for record in islice(records, _BATCH):
        batch.append(record)
        size += len(record.text)
        if size >= _BATCH_BYTES:
            break
    return batch


def _asked(process: subprocess.Popen[bytes], batch: Sequence[Record], prompt: str) -> list[list[Span]]:
    """Where each record's text is cut; a record without a text is one piece."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    texts = [_parts_of(record) if record.kind is RecordKind.TEXT else ("", "", "") for record in batch]
    asked = json.dumps([(prompt + before, text, after) for before, text, after in texts])
    try:
        process.stdin.write(asked.encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = b""
    if not answer.endswith(b"\n"):  # the process ended, perhaps within a line
        said = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise InputError(f"--long split cuts texts by the model's tokenizer, on this machine: {said or 'it failed'}")
    found: list[list[Span]] = json.loads(answer)
    return found


def _parts_of(record: Record) -> tuple[str, str, str]:
    """The text field's own part of a text, and what stands before and after it."""
    text = record.text.decode()
    start, end = record.own or (0, len(text))
    return text[:start], text[start:end], text[end:]


def _piece(record: Record, position: int, start: int, end: int) -> Record:
    place = {"parent": position if record.id is None else to_json(record.id), "start": start, "end": end}
    kept = with_members(record.kept, json.dumps(place).encode())
    label = None if record.id is None else check_id(f"{as_text(record.id)}#{start}", f"record {position}")
    if record.kind is not RecordKind.TEXT:
        return record._replace(id=label, kept=kept)
    before, text, after = _parts_of(record)
    return Record(record.kind, (before + text[start:end] + after).encode(), label, kept)

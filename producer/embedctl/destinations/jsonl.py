"""JSON lines, into a file or onto standard output: one for each record, or the answers to a batch file."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from embedctl.corpus.kept import TOKENS
from embedctl.destinations.answers import Answer, Answers
from embedctl.destinations.numbers import Dtype
from embedctl.destinations.unfinished import LineFile, json_line
from embedctl.destinations.writer import Content, Writer
from embedctl.waiting.results import ChunkVectors
from embedctl_config.errors import JobError, OutputError
from embedctl_config.outputs import Output
from embedctl_config.record_ids import to_json


def is_stdout(path: object) -> bool:
    """Whether a path means standard output."""
    return str(path) in ("-", "/dev/stdout")


def check_stdout() -> None:
    """Raise OutputError if there is no standard output."""
    if sys.stdout is None:
        raise OutputError("standard output is closed: name a file, or open it")


def errors_beside(path: Path) -> Path:
    """The file of a batch file's failed requests: `results.errors.jsonl` for `results.jsonl`."""
    return path.with_name(f"{path.stem}.errors.jsonl")


def lines_of(chunk: ChunkVectors) -> Iterator[bytes]:
    """A line for each record: `{"position", "id", "embedding"}`, with `sparse` (`{"indices", "values"}`) and `multi` (a
    list of vectors) if the job asks for them, or `{"position", "id", "error": {"code", "message"}}`
    for a failed one.

    The record's kept fields, under their own names, follow its id. A truncated record also has
    `"truncated": {"used", "lost"}`, and a record with a vector `"tokens"`, if the job counts them. Numbers have as many
    digits as identify a float32 exactly, at most nine (IEEE 754-2019, 5.12.2).
    """
    import orjson  # here, because most commands write no line

    errors = {error.position: error for error in chunk.errors}
    cuts = {cut.position: cut for cut in chunk.truncations}
    columns = _columns(chunk)
    tokens = None if chunk.tokens is None else chunk.tokens.tolist()
    for row, (position, label) in enumerate(zip(chunk.positions.tolist(), chunk.ids, strict=True)):
        head: dict[str, object] = {"position": position, "id": to_json(label)}
        if chunk.kept is not None:
            head |= chunk.kept[row]
        if position in cuts:
            head["truncated"] = {"used": cuts[position].used, "lost": cuts[position].lost}
        if position in errors:
            head["error"] = {"code": errors[position].code.value, "message": errors[position].message}
            yield json_line(head)
        else:
            if tokens is not None:
                head.setdefault(TOKENS, tokens[row])
            found = {name: of(row) for name, of in columns.items()}
            yield json_line(head)[:-1] + b"," + orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)[1:]


def _columns(chunk: ChunkVectors) -> dict[str, Callable[[int], object]]:
    """The vectors of a row, by the names that they have in a line."""
    columns: dict[str, Callable[[int], object]] = {}
    if chunk.vectors.shape[1]:
        columns["embedding"] = np.ascontiguousarray(chunk.vectors).__getitem__
    if chunk.sparse is not None:
        columns[Output.SPARSE.value] = [
            {"indices": indices, "values": weights} for indices, weights in chunk.sparse
        ].__getitem__
    if chunk.multi is not None:
        columns[Output.MULTI.value] = [*chunk.multi].__getitem__
    return columns


class JsonlWriter(Writer):
    """Writes lines: those of :func:`lines_of`, or the answers to a batch file. It has no room for digests. The answers
    of failed requests go to the file beside, which exists only if there are any, and on standard output among the
    others.

    On standard output, a chunk is printed as soon as it is there, and nothing has a final name. It raises OutputError
    if that is closed or can't be written, and BrokenPipeError if nobody reads any more.
    """

    def __init__(self, content: Content, answers: Answers | None = None) -> None:
        assert content.numbers.kind is Dtype.FLOAT32
        printed = is_stdout(content.path)
        beside = None if answers is None or printed else errors_beside(content.path)
        self.paths = [] if printed else [content.path, *([] if beside is None else [beside])]
        self._answers = answers
        self._lines = _StandardOutput() if printed else LineFile(content.path)
        self._errors = None if beside is None else LineFile(beside)
        self._any_failed = False

    def write(self, chunk: ChunkVectors) -> None:
        if self._answers is None:
            self._lines.write(lines_of(chunk))
        else:
            self._write_answers(self._answers.of(chunk))

    def gives_up(self, error: JobError) -> bool:
        return self._answers is not None and self._answers.give_up(error)

    def finish(self) -> list[Path]:
        if self._answers is not None:
            self._write_answers(self._answers.end())
        self.close()
        beside = [] if self._errors is None else self._errors.publish(kept=self._any_failed)
        return [*self._lines.publish(), *beside]

    def close(self) -> None:
        self._lines.close()
        if self._errors is not None:
            self._errors.close()

    def _write_answers(self, answers: Iterable[Answer]) -> None:
        good, failed = list[bytes](), list[bytes]()
        for answer in answers:
            (failed if answer.failed and self._errors is not None else good).append(answer.line)
        self._lines.write(good)
        if self._errors is not None and failed:
            self._any_failed = True
            self._errors.write(failed)


class _StandardOutput:
    def __init__(self) -> None:
        check_stdout()
        sys.stdout.flush()

    def write(self, lines: Iterable[bytes]) -> None:
        """Print all of them, and nothing that Python holds back and would write once more as it ends."""
        left = memoryview(b"".join(line + b"\n" for line in lines))
        try:
            while left:
                try:
                    left = left[os.write(sys.stdout.fileno(), left) :]
                except BlockingIOError:  # the other end has made it non-blocking
                    select.select([], [sys.stdout.fileno()], [])
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output can't be written: {error.strerror}") from error

    def close(self) -> None:
        """Nothing is open."""

    def publish(self) -> list[Path]:
        """Nothing has a name."""
        return []

"""`.jsonl`: one object per record, in input order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from embedctl.destinations.numbers import OutputType
from embedctl.destinations.unfinished import LineFile, json_line, publish
from embedctl.destinations.writer import Content, Writer
from embedctl.kept import TOKENS
from embedctl.results import ChunkVectors


def lines_of(chunk: ChunkVectors) -> Iterator[bytes]:
    """A line for each record: `{"position", "id", "embedding"}`, or `{"position", "id", "error": {"code", "message"}}`
    for a failed one.

    The record's kept fields, under their own names, follow its id. A truncated record also has
    `"truncated": {"used", "lost"}`, and a record with a vector `"tokens"`, if the job counts them. Numbers have as many
    digits as identify a float32 exactly, at most nine (IEEE 754-2019, 5.12.2).
    """
    import orjson  # here, because most commands write no line

    errors = {error.position: error for error in chunk.errors}
    cuts = {cut.position: cut for cut in chunk.truncations}
    vectors = np.ascontiguousarray(chunk.vectors)
    tokens = None if chunk.tokens is None else chunk.tokens.tolist()
    for row, (position, label) in enumerate(zip(chunk.positions.tolist(), chunk.ids, strict=True)):
        head: dict[str, object] = {"position": position, "id": label}
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
            numbers = orjson.dumps(vectors[row], option=orjson.OPT_SERIALIZE_NUMPY)
            yield json_line(head)[:-1] + b',"embedding":' + numbers + b"}"


class JsonlWriter(Writer):
    """Writes the lines of :func:`lines_of`. It has no room for digests."""

    def __init__(self, content: Content) -> None:
        assert content.numbers.kind is OutputType.FLOAT32
        self.paths = [content.path]
        self._file = LineFile(content.path)

    def write(self, chunk: ChunkVectors) -> None:
        for line in lines_of(chunk):
            self._file.write(line)

    def finish(self) -> list[Path]:
        self.close()
        publish(self.paths[0])
        return self.paths

    def close(self) -> None:
        self._file.close()

"""The records of an earlier output that are not in the corpus any more: `NAME.deleted.jsonl` next to the output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from embedctl.changes.earlier import Earlier, Rows
from embedctl.digests import DIGEST_BYTES
from embedctl.output.parts import json_line, locked, part_of, publish
from embedctl_config import durable
from embedctl_config.errors import OutputError


class Gone(NamedTuple):
    """A record that is gone: its id, if it had one, and the SHA-256 of its text in hexadecimal."""

    id: str | None
    text_sha256: str


def read_gone(path: Path) -> Iterator[Gone]:
    """What an earlier run found gone; nothing if there is no such file.

    Raises:
        OutputError: it is another kind of file.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                found = Gone(fields["id"], fields["text_sha256"])
                good = len(bytes.fromhex(found.text_sha256)) == DIGEST_BYTES and isinstance(found.id, str | None)
            except (ValueError, TypeError, LookupError):
                good = False
            if not good:
                raise OutputError(
                    f"{path}, line {number}: this is no list of deleted records: remove it, or name another output"
                )
            yield found


def gone_of(earlier: Earlier, rows_gone: Rows, before: Iterable[Gone]) -> Iterator[Gone]:
    """The records that are gone.

    Args:
        rows_gone: rows of the earlier output, ascending; beyond its last one, places in `before`.
        before: what was gone before it.
    """
    wanted = iter(rows_gone.tolist())
    row, first = next(wanted, None), 0
    for rows in earlier.read():
        while row is not None and row < first + len(rows.ids):
            yield Gone(rows.ids[row - first], rows.digests[row - first].tobytes().hex())
            row = next(wanted, None)
        first += len(rows.ids)
        if row is None:
            return
    for place, each in enumerate(before, first):
        if place == row:
            yield each
            row = next(wanted, None)


def write_gone(path: Path, gone: Iterable[Gone]) -> bool:
    """Write the list durably, or remove an older one if nothing is gone; returns whether something is.

    Raises:
        OutputError: it can't be written, or another process is writing it.
    """
    part, count = part_of(path), 0
    try:
        with locked(path):  # two at once would give each other's unfinished list its name
            part.unlink(missing_ok=True)  # it might be a link to another file
            with part.open("xb") as stream:
                for each in gone:
                    stream.write(json_line(each._asdict()) + b"\n")
                    count += 1
            if count:
                publish(path)
            else:
                part.unlink()
                durable.remove(path)
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror or os.strerror(error.errno or 0)}") from error
    return bool(count)

"""Errors from the workers' logs, without the parts that differ from line to line."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

#: The last line of a traceback: an exception's name and message.
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Lost|Unavailable|LeftOut)(?::.*)?$")
_VARYING = re.compile(r"(?<!\S)/[\w./-]+|[0-9a-f]{8,}|\d+")
_LONGEST = 110


def errors_in(files: Iterable[Path]) -> Counter[str]:
    """Count lines at ERROR or above and last lines of tracebacks. Paths, numbers and instance names are replaced."""
    found: Counter[str] = Counter()
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                for words in _words_of(line.strip()):
                    found[_VARYING.sub("N", words).replace("|", "/").strip()[:_LONGEST]] += 1
    return found


def _words_of(line: str) -> Iterator[str]:
    try:
        said = json.loads(line)
    except ValueError:  # output of a dying process is not a log line
        said = None
    if not isinstance(said, dict):
        if _RAISED.match(line):
            yield line
        return
    if said["level"] in ("ERROR", "CRITICAL"):
        yield f"{said['logger']}: {said['message'].partition(chr(10))[0]}"
    if "exception" in said:
        yield said["exception"]["traceback"].strip().rpartition("\n")[2]

"""What workers logged as errors, without what differs from one line to the next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_LINE = re.compile(r"\d{4}-\d\d-\d\d \S+ (?:ERROR|CRITICAL) (?P<words>.*)")
#: The last line of a traceback: an exception's name and message.
_RAISED = re.compile(r"(?P<words>[A-Za-z_][\w.]*(?:Error|Exception|Lost|Unavailable)(?::.*)?)$")
_VARYING = re.compile(r"(?<!\S)/[\w./-]+|[0-9a-f]{8,}|\d+")
_LONGEST = 110


def errors_in(files: Iterable[Path]) -> Counter[str]:
    """Lines at ERROR or above and ends of tracebacks, with paths, numbers and names of instances replaced."""
    found: Counter[str] = Counter()
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                match = _LINE.match(line) or _RAISED.match(line)
                if match:
                    found[_VARYING.sub("N", match["words"]).replace("|", "/").strip()[:_LONGEST]] += 1
    return found

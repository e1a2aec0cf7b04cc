"""The formats of a corpus, by the names of its files."""

from __future__ import annotations

from pathlib import Path

from embedctl.corpus.streams import COMPRESSIONS
from embedctl_config.errors import InputError

FORMATS = ("jsonl", "json", "csv", "tsv", "txt", "parquet")
#: The suffixes of a file's name → its format.
SUFFIXES = {**{f".{name}": name for name in FORMATS}, ".ndjson": "jsonl"}


def guess_format(path: str) -> str:
    """The format by a file's name, `jsonl` for standard input; raises InputError if it has no known suffix."""
    if path == "-":
        return "jsonl"
    suffix = _suffix(path)
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    raise InputError(
        f"{path}: can't tell the format from {suffix or 'a name without suffix'!r}; give --format {'|'.join(FORMATS)}"
    )


def is_known(path: str) -> bool:
    """Whether a file's name tells its format."""
    return _suffix(path) in SUFFIXES


def _suffix(path: str) -> str:
    """A file's suffix, without that of its compression."""
    plain = Path(path)
    if plain.suffix.lower() in COMPRESSIONS:
        plain = plain.with_suffix("")
    return plain.suffix.lower()

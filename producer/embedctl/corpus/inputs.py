"""The files that the arguments of a command name, files, folders, patterns and standard input, and their formats."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from embedctl.corpus.streams import COMPRESSIONS
from embedctl_config.errors import InputError

FORMATS = ("jsonl", "json", "csv", "tsv", "txt", "parquet")
#: The suffixes of a file's name → its format.
SUFFIXES = {**{f".{name}": name for name in FORMATS}, ".ndjson": "jsonl"}


def expanded(paths: Iterable[str], *, written: Collection[Path] = ()) -> list[str]:
    """The paths of all files, in the order of the arguments.

    A folder stands for the files in it whose suffix tells their format, sorted by name, without those in its folders. A
    pattern stands for the files that it matches, sorted; `**` matches folders of any depth. Hidden files are left out
    of both, and so are the files that the command will write, which are resolved.

    Raises InputError if there is no such file, no file in a folder or of a pattern, or if a file is given twice or will
    be written.
    """
    given: dict[Path, str] = {}
    files = []
    for argument in paths:
        for path in _files(argument, frozenset(written)):
            place = Path(path) if path == "-" else Path(path).resolve()
            if place in given:
                name = "standard input (-)" if path == "-" else path
                raise InputError(f"{name} is given twice: as {given[place]} and as {argument}. Name it once")
            if place in written:
                raise InputError(f"{path} is in the corpus, and the vectors would overwrite it: write them elsewhere")
            given[place] = argument
            files.append(path)
    return files


def _files(argument: str, written: Collection[Path]) -> Iterator[str]:
    if argument == "-":
        yield argument
        return
    if not argument:
        raise InputError("an empty name is given for a file of the corpus")
    try:
        kind = Path(argument).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not glob.has_magic(argument):
            raise InputError(f"{argument} can't be read: no such file") from None
        yield from _matching(argument, written)
    except OSError as error:
        raise InputError(f"{argument} can't be read: {error.strerror}") from None
    else:
        if stat.S_ISDIR(kind):
            yield from _in_folder(argument, written)
        else:
            yield argument


def _in_folder(folder: str, written: Collection[Path]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            known = [each for each in entries if is_known(each.name) and not each.name.startswith(".")]
            files = sorted(each.path for each in known if each.is_file() and Path(each.path).resolve() not in written)
    except OSError as error:
        raise InputError(f"{folder} can't be read: {error.strerror}") from None
    if not files:
        raise InputError(
            f"{folder} is a folder: no file in it ends in {', '.join(SUFFIXES)}, compressed or not. Name other files "
            f"with a pattern, such as {str(Path(folder, '**', '*.jsonl'))!r}"
        )
    return files


def _matching(pattern: str, written: Collection[Path]) -> list[str]:
    found = glob.iglob(pattern, recursive=True)  # noqa: PTH207  (Path.glob refuses absolute patterns)
    files = [path for path in found if Path(path).is_file()]
    files = sorted(path for path in files if Path(path).resolve() not in written)
    if not files:
        raise InputError(f"{pattern} can't be read: no file matches")
    return files


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

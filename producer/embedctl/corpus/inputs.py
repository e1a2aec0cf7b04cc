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
    of both, and so are the files that the command will write, which are resolved. A file to which one argument leads by
    several links is taken once.

    Raises InputError if there is no such file, no file in a folder or of a pattern, a link leads nowhere, or if a file
    is given twice or will be written.
    """
    given: dict[Path, str] = {}
    files = []
    for argument in paths:
        found = {_place(path): path for path in reversed(_files(argument, frozenset(written)))}
        for place, path in reversed(found.items()):
            if place in given:
                name = "standard input (-)" if path == "-" else path
                raise InputError(f"{name} is given twice: as {given[place]} and as {argument}. Name it once")
            if place in written:
                raise InputError(f"{path} is in the corpus, and the vectors would overwrite it: write them elsewhere")
            given[place] = argument
            files.append(path)
    return files


def _place(path: str) -> Path:
    return Path(path if path == "-" else os.path.realpath(path))


def _files(argument: str, written: Collection[Path]) -> list[str]:
    if argument == "-":
        return [argument]
    if not argument:
        raise InputError("an empty name is given for a file of the corpus")
    try:
        kind = Path(argument).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not glob.has_magic(argument):
            raise InputError(f"{argument} can't be read: no such file") from None
        return _matching(argument, written)
    except OSError as error:
        raise InputError(f"{argument} can't be read: {error.strerror}") from None
    return _in_folder(argument, written) if stat.S_ISDIR(kind) else [argument]


def _in_folder(folder: str, written: Collection[Path]) -> list[str]:
    known = [entry.path for entry in _entries(folder) if is_known(entry.name)]
    files = _those_to_read(known, written)
    if not files:
        raise InputError(
            f"{folder} is a folder: no file in it ends in {', '.join(SUFFIXES)}, compressed or not. Name other files "
            f"with a pattern, such as {str(Path(folder, '**', '*.jsonl'))!r}"
        )
    return files


def _matching(pattern: str, written: Collection[Path]) -> list[str]:
    files = _those_to_read(_found(pattern), written)
    if not files:
        raise InputError(f"{pattern} can't be read: no file matches")
    return files


def _those_to_read(paths: Iterable[str], written: Collection[Path]) -> list[str]:
    """The files among these paths, sorted. InputError: one is a link that leads nowhere."""
    files = []
    for path in paths:
        try:
            is_file = stat.S_ISREG(Path(path).stat().st_mode)
        except OSError as error:
            raise InputError(f"{path} can't be read: {error.strerror}") from None
        if is_file and _place(path) not in written:
            files.append(path)
    return sorted(files)


def _found(pattern: str) -> Iterator[str]:
    """What a pattern matches. Each real folder is looked into once, so links that lead in a circle do no harm.
    InputError: a folder can't be read."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern)  # noqa: PTH207  (Path.glob refuses absolute patterns)
        return
    at = parts.index("**")
    base, rest = "/".join(parts[:at]), "/".join(parts[at + 1 :]) or "*"
    seen: set[str] = set()
    for begin in _found(base) if glob.has_magic(base) else [base or "/" * bool(at)]:
        for folder in _folders(begin, seen) if not begin or Path(begin).is_dir() else ():
            yield from _found(str(Path(glob.escape(folder), rest)) if folder else rest)


def _folders(folder: str, seen: set[str]) -> Iterator[str]:
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    yield folder
    for entry in _entries(folder):
        if Path(entry).is_dir():
            yield from _folders(entry.path if folder else entry.name, seen)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder or ".") as entries:
            return sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)
    except OSError as error:
        raise InputError(f"{folder} can't be read: {error.strerror}") from None


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
    plain = Path(path)
    if plain.suffix.lower() in COMPRESSIONS:
        plain = plain.with_suffix("")
    return plain.suffix.lower()

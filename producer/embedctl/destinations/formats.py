"""The formats of files: which there are, what each has room for, and whether a file can be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from embedctl.corpus.batch import BATCH_FORMAT
from embedctl.destinations.jsonl import check_stdout, errors_beside, is_stdout
from embedctl.destinations.npy import ARRAYS, all_beside
from embedctl.destinations.numbers import FLOAT32, Dtype, Numbers
from embedctl.destinations.unfinished import check_folder
from embedctl.destinations.writer import Content, Writer
from embedctl_config.errors import SettingsError, UnusableOutput
from embedctl_config.outputs import PLAIN, Output


@dataclass(frozen=True, slots=True)
class FileFormat:
    """What writes a format, as `module:name`, and what it has room for beside ids and vectors of float32."""

    writer: str
    kept_fields: bool = False
    digests: bool = False
    other_numbers: bool = False
    outputs: Sequence[Output] = PLAIN


FORMATS = {
    "npy": FileFormat("embedctl.destinations.npy:NpyWriter", digests=True, other_numbers=True),
    "npz": FileFormat("embedctl.destinations.npz:NpzWriter", outputs=(Output.DENSE, Output.SPARSE)),
    "jsonl": FileFormat("embedctl.destinations.jsonl:JsonlWriter", kept_fields=True, outputs=tuple(Output)),
    "parquet": FileFormat(
        "embedctl.destinations.parquet:ParquetWriter",
        kept_fields=True,
        digests=True,
        other_numbers=True,
        outputs=tuple(Output),
    ),
}


def is_file(where: str) -> bool:
    """Whether a path is one of a file that can be written, and not one of a folder or a bucket."""
    return "://" not in where and where.lower().endswith(tuple(f".{each}" for each in FORMATS))


def check_output(
    path: Path, keep: Sequence[str] = (), *, clobber: bool = True, numbers: Numbers | None = None, batch: bool = False
) -> None:
    """Check beforehand that vectors, and these kept fields, can be written to a path; with `batch`, a .jsonl file will
    be one of requests, with another one beside it. SettingsError: the path has no suffix of a known format, or the
    format has no room for kept fields or no such numbers. UnusableOutput: the folder is missing, or not writable; a
    file exists that must not be replaced. OutputError: the disk is full, or standard output is closed."""
    file_format = guess_format(path)
    writer_of(file_format)
    refuse_numbers(path, file_format, numbers or FLOAT32)
    if keep and not FORMATS[file_format].kept_fields:
        raise SettingsError(
            f"{path} can't hold the kept fields ({', '.join(keep)}): name the output {with_room_for('kept_fields')}, "
            "or leave out --keep"
        )
    if is_stdout(path):
        check_stdout()
        return
    check_folder(path.absolute().parent, path)
    refuse_no_file(path)
    if not clobber:
        refuse_to_clobber(path, BATCH_FORMAT if batch and file_format == "jsonl" else file_format)


def files_of(path: Path) -> list[Path]:
    """The files that :func:`fetch` may write for a path, `path` first; none for standard output."""
    if is_stdout(path):
        return []
    return [path, *(all_beside(path) if path.suffix.lower().removeprefix(".") in ARRAYS else ())]


def guess_format(path: Path) -> str:
    """The format by a file's suffix, or a SettingsError; jsonl for standard output."""
    if is_stdout(path):
        return "jsonl"
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise SettingsError(f"{path}: name it .{', .'.join(FORMATS)}, or - for standard output (jsonl)")
    return suffix


def format_of(path: Path) -> FileFormat:
    """The format of a file, by its suffix; SettingsError if it is none."""
    return FORMATS[guess_format(path)]


def with_room_for(what: str) -> str:
    """The suffixes of the formats that have room for something, a field of :class:`FileFormat`, for a message."""
    return " or ".join(f".{name}" for name, each in FORMATS.items() if getattr(each, what))


def writer_of(file_format: str) -> Callable[[Content], Writer]:
    writer: Callable[[Content], Writer] = resolve_name(FORMATS[file_format].writer)
    return writer


def refuse_outputs(path: Path, file_format: str, asked: Sequence[Output]) -> None:
    """Raise SettingsError unless a file of this format can hold these vectors."""
    there = FORMATS[file_format].outputs if file_format in FORMATS else tuple(Output)  # answers to a batch file
    if lacking := [output for output in asked if output not in there]:
        others = [f".{name}" for name, each in FORMATS.items() if set(asked) <= set(each.outputs)]
        raise SettingsError(f"{path} can't hold {lacking[0]} vectors: name the output {' or '.join(others)}")


def refuse_numbers(path: Path, file_format: str, numbers: Numbers, stored: Numbers = FLOAT32) -> None:
    has_room = file_format != BATCH_FORMAT and FORMATS[file_format].other_numbers
    if numbers.kind is not Dtype.FLOAT32 and not has_room:
        others = with_room_for("other_numbers")
        where = "standard output" if is_stdout(path) else path
        if stored.kind is not Dtype.FLOAT32:
            more = "" if stored.kind is Dtype.BINARY else ", or have them restored with the dtype float32"
            raise SettingsError(
                f"the vectors were drained as {stored.kind}, and {where} takes float32 alone: name the output "
                f"{others}{more}"
            )
        raise SettingsError(f"{where} takes float32 alone: name the output {others} for {numbers.kind}")


def followed(path: Path) -> Path:
    """The file that a link leads to, so that it is written, and not replaced by another file; or else the path."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path  # resolve() raises for a link to itself


def refuse_no_file(path: Path) -> None:
    """Refuse what a finished file would replace: a folder, a pipe that somebody reads, or a device."""
    if path.exists() and not path.is_file():
        raise UnusableOutput(f"{path} can't be written: it is no file. Name one; or print into a pipe (-o - > PIPE)")


def refuse_to_clobber(path: Path, file_format: str) -> None:
    others = {**dict.fromkeys(ARRAYS, all_beside(path)), BATCH_FORMAT: [errors_beside(path)]}
    for file in (path, *others.get(file_format, ())):
        if os.path.lexists(file):
            raise UnusableOutput(f"{file} exists: remove it, choose another file, or omit --no-clobber to replace it")

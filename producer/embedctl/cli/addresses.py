"""Addresses in place of files: nothing is downloaded, and the error has the line that does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from urllib.parse import urlsplit

from embedctl.corpus.inputs import SUFFIXES
from embedctl_config.errors import InputError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
#: Scheme → the command that writes what is there to standard output.
_READERS = {"http": "curl -sSL {}", "https": "curl -sSL {}", "s3": "aws s3 cp {} -", "gs": "gcloud storage cat {}"}
_UNPACKERS = {".gz": " | gunzip", ".zst": " | zstd -dc"}


def refuse_addresses(paths: Iterable[str], command: str | None) -> None:
    """Raise InputError if a path of this subcommand is an address."""
    for path in paths:
        if found := _SCHEME.match(path):
            raise InputError(
                f"{path} is not a file, and embedctl downloads nothing. {_advice(path, found[1], command)}"
            )


def _advice(address: str, scheme: str, command: str | None) -> str:
    reader = _READERS.get(scheme.lower())
    if reader is None:
        return "Give the path of a file"
    place, dot, last = urlsplit(address).path.lower().rpartition(".")
    unpacker = _UNPACKERS.get(dot + last, "")
    suffix = "." + place.rpartition(".")[2] if unpacker else dot + last
    chosen = SUFFIXES.get(suffix, "jsonl")
    flag = "" if chosen == "jsonl" else f" --format {chosen}"
    return f"Pipe it: {reader.format(shlex.quote(address))}{unpacker} | embedctl {command} -{flag} …"

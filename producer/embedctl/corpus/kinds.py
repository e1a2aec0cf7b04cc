"""What a file is by its first bytes, where that contradicts its format."""

from __future__ import annotations

from embedctl.corpus.streams import looks_binary
from embedctl_config.errors import InputError

_PARQUET = b"PAR1"
_ARCHIVE = "an archive: unpack it"
_AS_PARQUET = "write it as parquet"
#: How files begin → what they are, and what to do with them.
_KINDS = {
    _PARQUET: "parquet: give --format parquet",
    b"PARE": "encrypted parquet: decrypt it",
    b"\x1f\x8b": "compressed: name it .gz, or pipe it through gunzip",
    b"BZh": "compressed: name it .bz2, or pipe it through bunzip2",
    b"\xfd7zXZ\0": "compressed: name it .xz, or pipe it through unxz",
    b"\x28\xb5\x2f\xfd": "compressed: name it .zst, or pipe it through zstd -dc",
    b"\x04\x22\x4d\x18": "compressed: pipe it through lz4 -dc",
    b"PK\x03\x04": "a zip archive, or a file of an office program: unpack it, or save it as .csv",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "a file of an office program: save it as .csv",
    b"7z\xbc\xaf\x27\x1c": _ARCHIVE,
    b"Rar!\x1a\x07": _ARCHIVE,
    b"%PDF-": "a PDF: extract its text",
    b"SQLite format 3\0": "a database of SQLite: export its table",
    b"ARROW1\0": f"a file of Arrow: {_AS_PARQUET}",
    b"ORC": f"ORC: {_AS_PARQUET}",
    b"Obj\x01": f"Avro: {_AS_PARQUET}",
    b"\x93NUMPY": "an array of NumPy: write its texts, one a line",
}
#: What may begin a text, too, is told by what follows.
_BZIP2 = (b"1AY&SY", b"\x17rE8P\x90")
_TAR_AT, _TAR = 257, b"ustar"
#: How much of a beginning is shown (bytes).
_SHOWN = 8


def refuse_another(head: bytes, file_format: str, name: str, *, encoded: bool) -> None:
    """Raise InputError if a file of a format can't begin so; if somebody said that it is `encoded` so, it may be any
    text."""
    if file_format == "parquet":
        if head and not head.startswith((_PARQUET, b"PARE")):
            raise InputError(f"{name} is not parquet: it begins with {head[:_SHOWN]!r}")
        return
    kind = next((said for begins, said in _KINDS.items() if head.startswith(begins) and _is_whole(begins, head)), "")
    if head[_TAR_AT:].startswith(_TAR):
        kind = _ARCHIVE
    if kind:
        raise InputError(f"{name} is not {file_format}, but {kind}")
    if not encoded and looks_binary(head):
        raise InputError(
            f"{name} is not {file_format}: it is no text in UTF-8. If it is one in another encoding, give --dialect "
            "encoding=…"
        )


def _is_whole(begins: bytes, head: bytes) -> bool:
    if begins == b"BZh":
        return head[4:].startswith(_BZIP2)
    return begins != b"ORC" or b"\0" in head or looks_binary(head)

"""Forms with a file, parsed as they arrive: the file's bytes are handed on, and only small fields are kept."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from embedctl_gateway.http.refusals import refuse

#: The field of the file.
FILE = "file"
#: Most parts of a form, and most bytes of a field that is no file.
_MOST_PARTS, _MOST_BYTES = 32, 8192
#: Most bytes behind the last part. Clients send a line end.
_MOST_AFTER = 8192
#: The longest name of a file (characters).
_LONGEST_NAME = 255


class Form:
    """A form that arrives in pieces: `fields` of the parts that have arrived in full, the file apart; its `file_name`,
    None before it begins; and `data`, those of its bytes that nobody has taken yet. Raises Refusal if the header tells
    of no form."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            refuse("the body is no form: send multipart/form-data", "invalid_content_type")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self.data = bytearray()
        self.complete = False
        self._parts = 0
        self._after = 0
        self._name = ""
        self._value: bytearray | None = None
        self._header = bytearray()
        self._header_value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            refuse("the boundary of the form is too long", "invalid_content_type")

    def add(self, piece: bytes) -> None:
        """Take a piece of the body; raises Refusal if it is not what a form may be."""
        if self.complete:
            self._after += len(piece)
            if self._after > _MOST_AFTER:
                refuse("something comes behind the last part of the form", "invalid_form")
            return
        try:
            self._parser.write(piece)
        except FormParserError:
            refuse("the body is no valid form (multipart/form-data)", "invalid_form")

    def taken(self) -> bytearray:
        """The file's bytes so far, which :attr:`data` no longer holds."""
        data, self.data = self.data, bytearray()
        return data

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            refuse(f"the form has more than {_MOST_PARTS} parts", "invalid_form")
        self._headers, self._name, self._value = {}, "", None

    def _header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._header_value)
        self._header, self._header_value = bytearray(), bytearray()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.fields or (self._name == FILE and self.file_name is not None):
            refuse(f"the form has the field {self._name[:100]} twice", "invalid_form", self._name[:100])
        if self._name == FILE:
            self.file_name = _file_name(options.get(b"filename", b""))
        else:
            self._value = bytearray()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self.data += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _MOST_BYTES:
            refuse(f"the field {self._name[:100]} has more than {_MOST_BYTES:,} bytes", "invalid_form")

    def _part_end(self) -> None:
        if self._value is not None:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.complete = True


def _file_name(given: bytes) -> str:
    """The last part of a name, without characters that nobody can see."""
    name = given.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(each for each in name if each.isprintable())[:_LONGEST_NAME] or "file"

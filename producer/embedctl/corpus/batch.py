"""OpenAI's batch files: each line is a request for the vectors of one text or of several, by the url of a call.

`{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "text"}}`
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, NamedTuple, NoReturn, Self

from embedctl.corpus.fields import refuse_twice
from embedctl.corpus.file import CorpusFile
from embedctl.corpus.lines import json_object
from embedctl.corpus.records import Record, check_id, kind_of, make_record
from embedctl.corpus.streams import bounded_lines, opened
from embedctl.corpus.unique import UniqueIds
from embedctl_config.errors import BatchFileError, InputError
from embedctl_config.model_names import other_spelling
from embedctl_config.outputs import Output
from embedctl_config.printable import printable
from embedctl_config.settings import check_model_name

#: The name of this format.
BATCH_FORMAT = "openai-batch"
#: What a record keeps of its request: which of the request's inputs it is, how many there are, and how the vectors are
#: to be written. The record's id is the request's.
KEPT_OF_REQUEST = ("index", "inputs", "encoding_format")


class Url(NamedTuple):
    """A call that requests name by its url: the vectors that they ask for, the field of their texts, and the fields
    beside that and the model. `user` names whose request it is, and changes no vector."""

    output: Output
    texts: str
    others: Sequence[str]


URLS: Mapping[str, Url] = {
    "/v1/embeddings": Url(Output.DENSE, "input", ("dimensions", "encoding_format", "user")),
    "/pooling": Url(Output.MULTI, "input", ("task", "encoding_format", "user")),
    "/embed_sparse": Url(Output.SPARSE, "inputs", ()),
}
_EMBEDDINGS = "/v1/embeddings"
#: Most inputs of a request, as at OpenAI.
_MAX_INPUTS = 2048
#: Most bytes of several texts in a request for multi-vectors: its answer is one line, of 1 kB or more for each token.
_MAX_MULTI_BYTES = 64 * 1024
#: Fields of other servers → what to do with them.
_INSTEAD = {
    "truncate_prompt_tokens": "leave it out, and give --long for all requests",
    "truncate": "leave it out, and give --long for all requests",
    "prompt_name": "leave it out, and give --prompt @NAME for all requests",
    "input_type": "leave it out, and give --prompt for all requests",
    "normalize": "leave it out, and give --normalize or --no-normalize for all requests",
}
#: Requests that a message names if they are refused; the others are counted.
_NAMED = 10
#: If so many lines are refused and none before them is right, the rest is not read.
_HOPELESS = 1000
#: A request's place is the number of its file, then that of its line.
_LINE_BITS = 40


class Request(NamedTuple):
    """What a line asks for. `inputs` are texts, or what stands in their place. None stands for a field not given."""

    custom_id: str
    inputs: list[object]
    model: str | None
    dimensions: int | None
    encoding_format: str


@dataclass(frozen=True, slots=True)
class Mistake:
    """Why a request is refused, with the code and the parameter as OpenAI names them."""

    place: int
    code: str
    param: str | None
    message: str


class _Refused(Exception):
    """Raised with a code, the parameter and a sentence."""


def is_batch(file: CorpusFile) -> bool:
    """Whether the first line of a file is a request, and no record of jsonl."""
    if file.file_format != "jsonl":
        return False
    with suppress(InputError):
        first = json_object(file.first_line(), "")
        return "custom_id" in first and isinstance(first.get("body"), dict) and "text" not in first
    return False


def url_of(file: CorpusFile) -> str:
    """The url of a file's first request, which is then that of all."""
    with suppress(InputError):
        url = json_object(file.first_line(), "").get("url")
        return url if isinstance(url, str) and url in URLS else _EMBEDDINGS
    return _EMBEDDINGS


class BatchCorpus:
    """The requests of batch files, in order. Standard input is copied to the disk, and then read like a file.

    Methods that read raise InputError if a file can't be read, or if there is no room for temporary files.

    Args:
        max_bytes: the longest text.
        limit: the most requests; None for all.
        unique: whether each custom_id must be unique.
        url: one of :data:`URLS`, that of all requests.

    Attributes:
        checked, inputs: how many requests :meth:`check` has read, and how many texts these have.
        text_bytes, field_bytes: the bytes of these texts, and about those of the ids and kept fields of their records.
    """

    def __init__(
        self,
        files: tuple[CorpusFile, ...],
        max_bytes: int,
        limit: int | None,
        *,
        unique: bool,
        url: str = _EMBEDDINGS,
    ) -> None:
        self.files = files
        self._url = url
        self.checked = self.inputs = self.text_bytes = self.field_bytes = 0
        self._named = _NAMED
        self._max_bytes = max_bytes
        self._limit = limit
        self._unique = unique
        self._piped: IO[bytes] | None = None

    @classmethod
    def of_copy(cls, copy: IO[bytes], max_bytes: int, named: int, url: str) -> Self:
        """The requests in an open file, in messages `standard input`; each custom_id must be unique. Of those that are
        refused, so many are named at most; the others are counted."""
        corpus = cls((CorpusFile("-", "jsonl", guessed=False),), max_bytes, None, unique=True, url=url)
        corpus._piped, corpus._named = copy, named
        return corpus

    @property
    def rereadable(self) -> bool:
        """Whether it can be read again by another command."""
        return all(file.rereadable for file in self.files)

    def check(self, model: str | None = None, dimensions: int | None = None) -> tuple[str | None, int | None]:
        """Read all requests, up to the limit, before anything is queued.

        They must agree with the model and the dimensions that the command asks for; None if it asks for nothing.

        Returns the model and the dimensions of all requests; None if neither they nor the command name them. Raises
        BatchFileError, which names the first ones and counts all, if some requests are refused, or if there is none.
        """
        shared = _Shared(model, dimensions)
        with UniqueIds(self._named) as ids:
            found = self._mistakes(shared, ids)
            mistakes = list(islice(found, self._named))
            wrong = len(mistakes) + sum(1 for _ in found)
            ids.find()
        mistakes += [
            Mistake(again, "duplicate_custom_id", "custom_id", f"its custom_id is that of {self._where(before)}")
            for again, before in ids.first
        ]
        if mistakes:
            raise self._refusal(sorted(mistakes, key=lambda each: each.place)[: self._named], wrong + ids.count)
        if not self.checked:
            raise self.empty()
        return shared.model, shared.dimensions

    def _mistakes(self, shared: _Shared, ids: UniqueIds) -> Iterator[Mistake]:
        """What is wrong with requests alone, or beside those before them; counts what is read."""
        self.checked = self.inputs = self.text_bytes = self.field_bytes = wrong = 0
        for place, line in self._lines():
            self.checked += 1
            try:
                row = _json(line)
                custom_id = _custom_id(row)
                if self._unique:
                    ids.add(custom_id, place)
                request = _request(custom_id, row, self._url)
                shared.check(request, self._where(place))
                self.inputs += len(request.inputs)
                self.text_bytes += _size_of(request.inputs)
                self.field_bytes += len(request.inputs) * (len(_kept(request, 0)) + _size_of([custom_id]))
            except _Refused as refused:
                wrong += 1
                yield Mistake(place, *refused.args)
            if wrong == self.checked == _HOPELESS:
                return

    def records(self, on_bad_line: object = None) -> Iterator[Record]:
        """A record for each input of each request, read lazily; BatchFileError if a line has changed since a check."""
        for request in self._all():
            for index, text in enumerate(request.inputs):
                yield make_record(text, request.custom_id, self._max_bytes, _kept(request, index))

    def requests(self) -> Iterator[tuple[str, int]]:
        """The custom_id of each request, and the number of its inputs. Raises as :meth:`records`."""
        for request in self._all():
            yield request.custom_id, len(request.inputs)

    def _all(self) -> Iterator[Request]:
        for place, line in self._lines():
            try:
                row = _json(line)
                request = _request(_custom_id(row), row, self._url)
            except _Refused as refused:
                raise self._refusal([Mistake(place, *refused.args)], 1) from None
            yield request

    def empty(self) -> InputError:
        """The error for files without a request."""
        mistake = Mistake(0, "empty_batch", None, "it holds no request")
        name = self.files[0].name
        return BatchFileError(f"{name}: empty_batch: it holds no request", data=[_as_data(mistake, None)])

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        lines = (
            (number << _LINE_BITS | line_number, line)
            for number, file in enumerate(self.files)
            for line_number, line in enumerate(self._lines_of(file), start=1)
            if line.strip()
        )
        return islice(lines, self._limit)

    def _lines_of(self, file: CorpusFile) -> Iterable[bytes]:
        if file.path != "-":
            return file.plain_lines()
        if self._piped is None:
            self._piped = _copy_of_standard_input()
        self._piped.seek(0)
        return bounded_lines(self._piped, file.name)  # type: ignore[arg-type]  # an IO[bytes] is a BinaryIO

    def _where(self, place: int) -> str:
        return f"{self.files[place >> _LINE_BITS].name}, line {_line_of(place)}"

    def _refusal(self, first: list[Mistake], count: int) -> BatchFileError:
        lines = [f"{self._where(each.place)}: {_in_words(each)}" for each in first[:_NAMED]]
        data = [_as_data(each, _line_of(each.place)) for each in first]
        if count == 1:
            return BatchFileError(*lines, data=data)
        more = ["…"] if count > len(lines) else []
        return BatchFileError(f"{count:,} requests are refused, and nothing is queued.", *lines, *more, data=data)


class _Shared:
    """What all requests of a job must have in common."""

    def __init__(self, model: str | None, dimensions: int | None) -> None:
        self.model = model
        self.dimensions = dimensions
        self._model_of = "--model (EMBEDCTL_MODEL)" if model is not None else ""
        self._dimensions_of = "--dims" if dimensions is not None else ""

    def check(self, request: Request, where: str) -> None:
        """Refuse a request that does not agree with those before it."""
        self._check_model(request.model, where)
        if not self._dimensions_of:
            self.dimensions, self._dimensions_of = request.dimensions, where
        if request.dimensions is None and self._dimensions_of == "--dims":
            return
        if request.dimensions != self.dimensions:
            _refuse(
                "model_mismatch",
                "body.dimensions",
                f"dimensions is {json.dumps(request.dimensions)}, and {json.dumps(self.dimensions)} in "
                f"{self._dimensions_of}; all vectors of a job have the same number: split the file",
            )

    def _check_model(self, model: str | None, where: str) -> None:
        if model is None:
            return
        if not self._model_of:
            self.model, self._model_of = model, where
        if self.model not in (model, other_spelling(model)):
            _refuse(
                "model_mismatch",
                "body.model",
                f"model is {model!r}, and {self.model!r} in {self._model_of}; a "
                "job has one model: split the file, or give the --model that all its requests name",
            )


def _copy_of_standard_input() -> IO[bytes]:
    try:
        copy = tempfile.TemporaryFile()  # noqa: SIM115  (it goes with its corpus)
        with opened("-") as stream:
            shutil.copyfileobj(stream, copy)
    except OSError as error:
        raise InputError(
            f"standard input can't be copied to {tempfile.gettempdir()}: {error.strerror}. Make room there, or set "
            "TMPDIR"
        ) from error
    return copy


def _json(line: bytes) -> Mapping[str, Any]:
    try:
        row = json_object(line, "")
        refuse_twice(row, "")
        if isinstance(body := row.get("body"), dict):
            refuse_twice({f"body.{name}": value for name, value in body.items()}, "")
    except InputError as error:
        _refuse("invalid_json_line", None, str(error).removeprefix(": "))
    return row


def _custom_id(row: Mapping[str, Any]) -> str:
    custom_id = row.get("custom_id")
    if custom_id is None:
        _refuse("missing_required_parameter", "custom_id", "no custom_id: give each request one")
    if not isinstance(custom_id, str):
        _refuse("invalid_type", "custom_id", f"custom_id is {kind_of(custom_id)}, not a string")
    try:
        check_id(custom_id, "custom_id")
    except InputError as error:
        _refuse("invalid_value", "custom_id", str(error))
    return custom_id


def _request(custom_id: str, row: Mapping[str, Any], url: str) -> Request:
    """A line's request, unless it is none that a job of requests to this url can answer."""
    output, texts, others = URLS[url]
    if row.get("method") not in (None, "POST"):
        _refuse("invalid_value", "method", f"method is {row['method']!r}, not 'POST'")
    if row.get("url") not in (None, url):
        where = ", ".join(URLS)
        _refuse("url_mismatch", "url", f"url is {row['url']!r}, not {url!r}: all requests of a job name one of {where}")
    body = row.get("body")
    if not isinstance(body, dict):
        _refuse("missing_required_parameter", "body", f"no body, which is an object with the model and the {texts}")
    for name, value in body.items():
        if name not in ("model", texts, *others) and value is not None:
            instead = _INSTEAD.get(name, "leave it out")
            _refuse("unsupported_parameter", f"body.{name}", f"{name} can't be given in a request: {instead}")
    dimensions, encoding_format = body.get("dimensions"), body.get("encoding_format")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        _refuse("invalid_value", "body.dimensions", f"dimensions is {dimensions!r}, not a whole number from 1 on")
    if encoding_format not in (None, "float", "base64"):
        _refuse("invalid_value", "body.encoding_format", f"encoding_format is {encoding_format!r}: float or base64")
    if body.get("task") not in (None, "token_embed"):
        _refuse("invalid_value", "body.task", f"task is {body['task']!r}, not 'token_embed'")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        _refuse("invalid_type", "body.model", f"model is {kind_of(model)}, not a name")
    if model is not None and (wrong := check_model_name(model)):
        _refuse("invalid_value", "body.model", wrong)
    inputs = _inputs(body, texts)
    if output is Output.MULTI and len(inputs) > 1 and (size := _size_of(inputs)) > _MAX_MULTI_BYTES:
        message = f"{texts} has {size:,} bytes in several texts; a request has {_MAX_MULTI_BYTES:,}: divide it"
        _refuse("max_tokens_per_request", f"body.{texts}", message)
    return Request(custom_id, inputs, model, dimensions, encoding_format or "float")


def _inputs(body: Mapping[str, Any], name: str) -> list[object]:
    """The texts of a request. Whatever else stands in the place of a text fails alone, as it does in other formats."""
    where = f"body.{name}"
    if name not in body:
        _refuse("missing_required_parameter", where, f"no {name}: give a text, or an array of texts")
    given = body[name]
    inputs = given if isinstance(given, list) else [given]
    if not 1 <= len(inputs) <= _MAX_INPUTS:
        _refuse("invalid_value", where, f"{name} has {len(inputs):,} texts; a request has 1 to {_MAX_INPUTS:,}")
    if isinstance(given, list) and any(type(each) in (int, list) for each in given):
        _refuse(
            "invalid_type", where, f"{name} holds token ids, which only the model's own server takes: give the text"
        )
    return inputs


def _kept(request: Request, index: int) -> bytes:
    """What the record of an input keeps of its request."""
    kept = {"index": index, "inputs": len(request.inputs), "encoding_format": request.encoding_format}
    return json.dumps(kept).encode()


def _size_of(inputs: Iterable[object]) -> int:
    """The bytes of texts."""
    return sum(len(each.encode(errors="surrogatepass")) for each in inputs if isinstance(each, str))


def _refuse(code: str, param: str | None, message: str) -> NoReturn:
    raise _Refused(code, param and printable(param), printable(message))


def _line_of(place: int) -> int:
    return place & (1 << _LINE_BITS) - 1


def _in_words(mistake: Mistake) -> str:
    at = "" if mistake.param is None else f" ({mistake.param})"
    return f"{mistake.code}{at}: {mistake.message}"


def _as_data(mistake: Mistake, line: int | None) -> dict[str, object]:
    return {"code": mistake.code, "message": mistake.message, "param": mistake.param, "line": line}

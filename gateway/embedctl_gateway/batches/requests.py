"""The requests of a batch, from files that anybody may have written or deleted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from embedctl.corpus.batch import BatchCorpus
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import FileGone, FileStore
from embedctl_config.errors import BatchFileError, InputError
from embedctl_gateway.batches.answers import BadLine, lines_of, only, requests_of

#: Lines that are named if they are refused.
_NAMED = 200
#: What the requests are read from, in messages.
_INPUT = "the input file"


class Refused(Exception):
    """Raised with what is wrong with a batch, as OpenAI lists it."""


def told(code: str, message: str) -> dict[str, object]:
    """What is wrong with a batch, and not with one of its lines."""
    return {"code": code, "message": message, "param": None, "line": None}


#: What is told of requests that nobody knows any more.
GONE = told("invalid_input_file", "the input file, or that of the requests to retry, is deleted or expired")


class Requests:
    """Those of a batch, with texts of up to `most` bytes. `check` is called after each part that is read; what it
    raises ends the reading."""

    def __init__(self, files: FileStore, batch: StoredBatch, most: int, check: Callable[[], None]) -> None:
        self._files = files
        self._batch = batch
        self._most = most
        self._check = check

    @contextmanager
    def copied(self) -> Iterator[BatchCorpus]:
        """The requests, in a file of this machine; raises Refused if their file is gone, or a line of it too large."""
        with tempfile.TemporaryFile() as copy:
            try:
                corpus = self.copied_to(copy)
            except FileGone:
                raise Refused([GONE]) from None
            except BadLine as error:
                raise Refused([{**told(error.code, str(error)), "line": error.line}]) from None
            yield corpus

    def copied_to(self, copy: IO[bytes]) -> BatchCorpus:
        """The requests, which are copied to an open file without a name, so that a kill leaves nothing; raises FileGone
        if their file is gone, or that of the answers that they are to replace, and BadLine."""
        lines = requests_of(self._parts(self._batch.facts["input_file_id"]), self._most)
        if retried_id := self._batch.facts.get("retried_file_id"):
            lines = only(lines, lines_of(self._parts(retried_id)))
        copy.writelines(lines)
        return BatchCorpus.of_copy(copy, self._most, _NAMED, self._batch.facts["endpoint"])

    def _parts(self, file_id: str) -> Iterator[bytes]:
        file = self._files.get(file_id, self._batch.tenant)
        if file is None:
            raise FileGone(f"{file_id} is gone")
        for part in self._files.read(file):
            self._check()
            yield part


def check(corpus: BatchCorpus) -> tuple[str | None, int | None]:
    """The model and the dimensions that all requests name, None if they name none; raises Refused, with the lines that
    are wrong."""
    try:
        return corpus.check()
    except InputError as error:
        found = error.data if isinstance(error, BatchFileError) else [told("invalid_value", str(error))]
        said = [str(each["message"]).replace(corpus.files[0].name, _INPUT) for each in found]
        raise Refused([{**each, "message": words} for each, words in zip(found, said, strict=True)]) from None

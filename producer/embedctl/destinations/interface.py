"""The interface of a destination: where finished vectors come to rest, each under its record's id.

The destination is the only witness of what it holds. No note of progress is kept anywhere else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from embedctl.destinations.numbers import Dtype
from embedctl.store import JobSpec, JobStatus
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import OtherContract, OutputError, SettingsError
from embedctl_config.fingerprint import deciding, job_fingerprint
from embedctl_config.outputs import PLAIN, Output, asked_by
from embedctl_config.record_ids import TEXT, IdType, RecordId, as_text

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Vectors as they are stored: float32 or float16, records × dimensions; or, of binary, uint8, records × bytes.
Stored = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint8]
#: The entry of a parquet file's footer, and of the file beside an array, that is the contract of its vectors.
ABOUT = "embedctl.about"
#: An id and the source of its row; None if the row does not tell from what it was made.
Row = tuple[RecordId, bytes | None]
#: A source as a text; and what stands before a text of somebody else, which so is no source's 16 bytes.
_HEXADECIMAL, _NO_SOURCE = re.compile("[0-9a-f]{32}"), bytes(17)


@dataclass(frozen=True, slots=True)
class Contract:
    """What decides the vectors of a destination. Vectors of two contracts can't be compared.

    Attributes:
        fingerprint: the job's, over its model's files and the options that decide its vectors: sha256 in hexadecimal.
        model: the name that the job was submitted with.
        precision: what the vectors promise, such as `fp32`.
        options: the options that decide them.
        dim: dimensions of a vector; 0 while no worker has told them, and in a file, which tells them itself.
        dtype: of the dense vectors: float32, float16 or binary; of a file, which tells its numbers itself, float32.
        model_fingerprint: the model's part of the fingerprint; empty where none is kept.
        ids: the type of the ids, as :class:`IdType` writes it; empty if it is not known.
        sparse_dim, multi_dim: the size of the vocabulary of sparse vectors, and the dimensions of each vector of a
            multi-vector; 0 as `dim`, or where there are none.
    """

    fingerprint: str
    model: str
    precision: str
    options: Mapping[str, Any]
    dim: int = 0
    dtype: str = "float32"
    model_fingerprint: str = ""
    ids: str = ""
    sparse_dim: int = 0
    multi_dim: int = 0

    @classmethod
    def of(cls, job: JobStatus | JobSpec, dim: int = 0, dtype: str = "float32", *, model: str | None = None) -> Self:
        """The contract of a job whose model is known, because a worker has claimed a chunk of it, or whose model's
        fingerprint is given here."""
        model = model or (job.model_fingerprint if isinstance(job, JobStatus) else None) or ""
        fingerprint = job_fingerprint(model, job.options)
        return cls(fingerprint, job.model, job.precision, deciding(job.options), dim, dtype, model)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self | None:
        """What :attr:`text` wrote; None if it is something else."""
        try:
            facts = json.loads(text)
            return cls(**{name: facts[name] for name in cls.__dataclass_fields__ if name in facts})
        except (ValueError, TypeError):
            return None

    @classmethod
    def in_file(cls, text: str | bytes, where: str) -> Self:
        """What :attr:`text` wrote into a file; OutputError if it did not write this."""
        found = cls.from_json(text)
        try:
            if found is not None and found.fingerprint == job_fingerprint(found.model_fingerprint, found.options):
                return found
        except (TypeError, AttributeError):
            pass
        raise OutputError(f"{where}: what it says of its vectors is damaged: restore it, or remove the output")

    @property
    def text(self) -> str:
        """As JSON on one line."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def outputs(self) -> Sequence[Output]:
        """The vectors of each row."""
        return asked_by(self.options)

    @property
    def sizes(self) -> Mapping[Output, int]:
        """The size of the vectors of each kind; 0 while no worker has told it."""
        known = {Output.DENSE: self.dim, Output.SPARSE: self.sparse_dim, Output.MULTI: self.multi_dim}
        return {output: known[output] for output in self.outputs}

    @property
    def is_sized(self) -> bool:
        return all(self.sizes.values())

    @property
    def multi_type(self) -> np.dtype[Any]:
        """The type of the numbers of multi-vectors: float16 or float32."""
        return np.dtype(np.float16 if self.dtype == Dtype.FLOAT16 else np.float32)

    @property
    def digest(self) -> bytes:
        """16 bytes of SHA-256 over what decides a stored vector. The name of a model and a promise decide none, and the
        dimensions follow from the fingerprint."""
        return hashlib.sha256(json.dumps([self.fingerprint, self.dtype]).encode()).digest()[:16]

    def sources(self, text_digests: Iterable[bytes]) -> list[bytes]:
        """From what rows are made: 16 bytes of SHA-256 over the contract and the SHA-256 of a text, for each text."""
        contract, sha256 = self.digest, hashlib.sha256
        return [sha256(contract + each).digest()[:16] for each in text_digests]

    def refuse_other(self, found: Contract | None, name: str) -> None:
        """Raise OtherContract unless a destination of this name is bound to this one. Its contract is None if it holds
        records, and nothing tells what made them."""
        if found is None:
            raise OtherContract(
                f"{name} holds records, and nothing there tells what model made their vectors: choose another name, "
                "which is made if it does not exist"
            )
        if found.digest != self.digest or (self.is_sized and found.sizes != self.sizes):
            raise OtherContract(
                f"{name} is bound to vectors of {found.in_words}, and these are of {self.in_words}. Vectors of two "
                "models, or of two prompts, can't be compared: choose another name"
            )

    @property
    def in_words(self) -> str:
        options = ", ".join(f"{name} {value!r}" for name, value in sorted(self.options.items()) if value is not None)
        dims = f"{self.dim} × {self.dtype}" if self.dim else self.dtype
        return f"{self.model} ({options}; {dims}; fingerprint {self.fingerprint[:12]})"


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that are written and made durable together. No id occurs twice.

    Attributes:
        vectors: in the type of the contract; all finite, as those of the other kinds.
        sources: from what each row is made; None if the job has no digests of its texts.
        kept: each record's kept fields as a JSON object; None if the job keeps none.
        positions: int64, of the records in the job.
        sparse, multi: the vectors of these kinds, a row for each record; None if the contract has none.
    """

    ids: Sequence[RecordId]
    vectors: Stored
    sources: Sequence[bytes] | None = None
    kept: Sequence[str] | None = None
    positions: npt.NDArray[np.int64] | None = None
    sparse: SparseVectors | None = None
    multi: MultiVectors | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, rows: slice | npt.NDArray[np.int64]) -> Batch:
        def of(values: Sequence[T]) -> Sequence[T]:
            return values[rows] if isinstance(rows, slice) else [values[row] for row in rows.tolist()]

        return replace(
            self,
            ids=of(self.ids),
            vectors=self.vectors[rows],
            sources=None if self.sources is None else of(self.sources),
            kept=None if self.kept is None else of(self.kept),
            positions=None if self.positions is None else self.positions[rows],
            sparse=None if self.sparse is None else self.sparse.select(rows),
            multi=None if self.multi is None else self.multi.select(rows),
        )

    @property
    def rows(self) -> list[Row]:
        sources: Sequence[bytes | None] = self.sources or [None] * len(self)
        return list(zip(self.ids, sources, strict=True))


def source_to_text(source: bytes) -> str:
    """A source in hexadecimal, for a destination that keeps texts."""
    return source.removeprefix(_NO_SOURCE).decode() if source.startswith(_NO_SOURCE) else source.hex()


def source_of_text(text: str) -> bytes:
    """What :func:`source_to_text` makes this text of; it is no source if somebody has edited it."""
    return bytes.fromhex(text) if _HEXADECIMAL.fullmatch(text) else _NO_SOURCE + text.encode()


class Destination(ABC):
    """A place that takes records by their ids: a record whose id is there replaces the one there.

    It is made from a URL and the settings, which opens nothing. :meth:`open` comes first, and :meth:`close` last in any
    case. Every method but :meth:`close` may be called again after any failure, also by another process.

    Every method raises DestinationUnavailable for what may pass: it can't be reached, has no room, or was disturbed by
    another client. It raises DestinationRefused for what it will never take, and another OutputError for what is wrong
    with all records, such as a missing column. None of them may contain a password.
    """

    #: What it is called for people: its URL, without secrets.
    name: str
    #: A batch has about so many records, and no more than about so many bytes of vectors, ids and kept fields.
    batch_records: int = 5_000
    batch_bytes: int = 64 * 1024 * 1024
    #: The outputs that it can hold, and the types of dense vectors.
    outputs: Sequence[Output] = PLAIN
    dtypes: Sequence[Dtype] = (Dtype.FLOAT32, Dtype.FLOAT16)
    #: What serves in place of other types there, as the end of a sentence.
    instead = ""
    #: The type of the ids there, once it is open.
    id_type: IdType = TEXT

    @abstractmethod
    def open(self, contract: Contract | None) -> bool:
        """Create or open it. Afterwards it is bound to this contract, also against a second creator.

        Args:
            contract: with 0 dimensions, only what is there is opened, and nothing is created. None: see beforehand that
                it can be reached, as far as that costs nothing.

        Returns:
            Whether it holds rows.

        Raises:
            OtherContract: it is bound to another contract, or holds records that are bound to none.
            OutputError: it has other columns, or ids of a type that those of the contract can't have.
        """

    def refuse_outputs(self, asked: Sequence[Output]) -> None:
        """Raise SettingsError unless it can hold these vectors."""
        if lacking := [output for output in asked if output not in self.outputs]:
            raise SettingsError(
                f"{self.name} can't hold {lacking[0]} vectors as embedctl writes it: name another destination with -o, "
                "such as a .parquet file"
            )

    def refuse_dtype(self, asked: Dtype) -> None:
        """Raise SettingsError unless it takes dense vectors of this type."""
        if asked not in self.dtypes:
            others = f"choose one of {', '.join(self.dtypes)}{self.instead}"
            raise SettingsError(f"{self.name} does not search vectors of the dtype {asked}: {others}")

    def take_ids(self, found: IdType, contract: Contract) -> None:
        """Take note of the type of the ids there. Text holds ids of any type, and that is said."""
        self.id_type, wanted = found, IdType.named(contract.ids)
        if not contract.ids or wanted == found:
            return
        if found != TEXT:
            raise OutputError(
                f"{self.name}: its ids are of the type {found}, and those of the corpus of the type {wanted}: choose "
                "another name, which is made if it does not exist"
            )
        log.warning(
            "%s: its ids are text, and those of the corpus of the type %s. They are written as text, so an id is equal "
            "to its text there",
            self.name,
            wanted,
        )

    def held(self, ids: Sequence[RecordId]) -> Sequence[RecordId]:
        """Ids as they are there."""
        if self.id_type != TEXT or set(map(type, ids)) <= {str}:
            return ids
        return [as_text(label) for label in ids]

    @abstractmethod
    def sources(self, ids: Sequence[RecordId]) -> Mapping[RecordId, bytes | None]:
        """The sources of those rows that are there, of not more ids than a batch has."""

    @abstractmethod
    def ids(self) -> Iterator[Row]:
        """All rows, in any order, with bounded memory. Some of them may be deleted meanwhile."""

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Write a batch of at least one record. On return it is durable. The same batch twice changes nothing.

        If it raises, any part of the batch may be written.
        """

    @abstractmethod
    def delete(self, rows: Sequence[Row]) -> int:
        """Delete, durably, those rows whose id and source are still these; returns how many."""

    @abstractmethod
    def close(self) -> None:
        """Finish what only the end can, and free what :meth:`open` took. May be repeated."""

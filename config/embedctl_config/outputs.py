"""The outputs that a model can give of a text, and the form of those beside the dense vector in a result.

A *section* holds one output of all rows of a result: ``u32 dtype`` (1 = float32, 2 = float16), ``u32 width``,
``u32 crc32`` of these two and of all that follows, ``u32 counts[rows]``, [``u32 indices[sum]``], then the numbers:
``sum`` weights of sparse vectors, or ``sum × width`` of multi-vectors. A failed record's count is 0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from embedctl_config.errors import SettingsError, WireForeign

#: NumPy's name of each type of numbers in a result, by its number, and the bytes of one.
DTYPES = {1: "<f4", 2: "<f2"}
NUMBERS = {name: number for number, name in DTYPES.items()}
SIZES = {"<f4": 4, "<f2": 2}
_HEAD = struct.Struct("<III")

#: Gives the next bytes of a result, and raises WireTruncated if there are not as many.
Take = Callable[[int], bytes | memoryview]


class Output(StrEnum):
    """What a model gives of a text, in the order in which everything lists them."""

    DENSE = "dense"  # one vector
    SPARSE = "sparse"  # weights of some words of a vocabulary
    MULTI = "multi"  # a vector for each token


#: What a job that says nothing asks for.
PLAIN = (Output.DENSE,)


def outputs_of(names: str | Iterable[str]) -> tuple[Output, ...]:
    """Outputs, such as those of `dense,sparse`, in their order; SettingsError if there is none, one that does not
    exist, or one twice."""
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else [str(name) for name in names]
    known = ", ".join(Output)
    for name in given:
        if name not in tuple(Output):
            raise SettingsError(f"vectors: {name!r} is none of {known}")
        if given.count(name) > 1:
            raise SettingsError(f"vectors: {name} is named twice")
    if not given:
        raise SettingsError(f"vectors: name one or more of {known}")
    return tuple(output for output in Output if output in given)


def asked_by(options: Mapping[str, Any]) -> tuple[Output, ...]:
    """The outputs that a job with these options asks for; raises as :func:`outputs_of`."""
    names = options.get("vectors")
    return PLAIN if names is None else outputs_of(names)


def not_given(asked: Iterable[Output], given: Sequence[str], model: str) -> str:
    """Why a model that gives some outputs can't do a job that asks for others, in a sentence; empty if it can."""
    lacking = [output for output in asked if output not in given]
    if not lacking:
        return ""
    lacks, gives = " or ".join(lacking), " and ".join(given)
    return f"model {model} gives no {lacks} vectors, but {gives}: ask for them with --vectors {','.join(given)}"


@dataclass(frozen=True, slots=True)
class Sparse:
    """Sparse vectors of rows: `width` is the size of the vocabulary, and `counts` are the numbers of weights by row.

    `indices` (uint32, ascending within a row) and `weights` (float32) are those of all rows, one after the other,
    little-endian.
    """

    width: int
    counts: Sequence[int]
    indices: bytes | memoryview
    weights: bytes | memoryview

    def section(self) -> bytes:
        """The form in a result; ValueError unless the sizes fit."""
        if not len(self.indices) == len(self.weights) == 4 * sum(self.counts):
            raise ValueError(f"{len(self.indices)} and {len(self.weights)} bytes are not {sum(self.counts)} weights")
        return _section("<f4", self.width, self.counts, self.indices, self.weights)

    @classmethod
    def read(cls, take: Take, rows: int) -> Self:
        """Read a section; WireForeign if it is damaged or goes beyond its vocabulary, or as `take` raises."""
        section = _Section(take, rows)
        size = 4 * sum(section.counts)
        found = cls(section.width, section.counts, section.take(size), section.take(size))
        section.check()
        if max(_numbers(found.indices), default=-1) >= section.width or section.dtype != "<f4":
            raise WireForeign("the sparse vectors of a result go beyond their vocabulary, or have another type")
        return found


@dataclass(frozen=True, slots=True)
class Multi:
    """Multi-vectors of rows: `counts` are the numbers of vectors by row, and `width` is the dimensions of each.

    `vectors`, of `dtype` (`<f4` or `<f2`), are those of all rows, one after the other, row-major.
    """

    width: int
    counts: Sequence[int]
    vectors: bytes | memoryview
    dtype: str = "<f4"

    def section(self) -> bytes:
        """The form in a result; ValueError unless the sizes fit."""
        if len(self.vectors) != sum(self.counts) * self.width * SIZES[self.dtype]:
            raise ValueError(f"{len(self.vectors)} bytes are not {sum(self.counts)} × {self.width} {self.dtype}")
        return _section(self.dtype, self.width, self.counts, self.vectors)

    @classmethod
    def read(cls, take: Take, rows: int) -> Self:
        """Read a section; WireForeign if it is damaged, or as `take` raises."""
        section = _Section(take, rows)
        size = sum(section.counts) * section.width * SIZES[section.dtype]
        found = cls(section.width, section.counts, section.take(size), section.dtype)
        section.check()
        return found


def _section(dtype: str, width: int, counts: Sequence[int], *parts: bytes | memoryview) -> bytes:
    facts = struct.pack("<II", NUMBERS[dtype], width)
    body = b"".join([struct.pack(f"<{len(counts)}I", *counts), *parts])
    return facts + struct.pack("<I", zlib.crc32(body, zlib.crc32(facts))) + body


def _numbers(data: bytes | memoryview) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


class _Section:
    """A section up to its counts; what is taken after them is added to its checksum."""

    def __init__(self, take: Take, rows: int) -> None:
        self._take = take
        dtype, self.width, self._checksum = _HEAD.unpack(take(_HEAD.size))
        if dtype not in DTYPES:
            raise WireForeign(f"the vectors of a result are of type {dtype}, which does not exist")
        self.dtype = DTYPES[dtype]
        self._crc = zlib.crc32(struct.pack("<II", dtype, self.width))
        self.counts = _numbers(self.take(4 * rows))

    def take(self, size: int) -> bytes | memoryview:
        part = self._take(size)
        self._crc = zlib.crc32(part, self._crc)
        return part

    def check(self) -> None:
        if self._crc != self._checksum:
            raise WireForeign(
                "the vectors of a result are damaged: their checksum does not match. Submit the corpus again"
            )

"""The protocol of a sink: a database that takes the vectors of jobs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from embedctl.results import Vectors
from embedctl_config.errors import MixedVectors, SettingsError

#: How far a component of a vector that is read back may be from the one that was written, for float32 and for float16.
TOLERANCE, HALF_TOLERANCE = 1e-6, 2e-3
#: Under this name a database's note on a table holds :class:`Provenance` as JSON.
NOTE = "embedctl"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made the vectors of a table.

    Attributes:
        fingerprint: the job's, over its model, prompt, truncation, scaling and dimensions: sha256 in hexadecimal.
        precision: what the vectors promise, such as `fp32`.
        model: the name that the job was submitted with.
        dim: dimensions of a vector.
    """

    fingerprint: str
    precision: str
    model: str
    dim: int

    def to_json(self) -> str:
        """As JSON on one line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """What :meth:`to_json` wrote; None if the text is something else."""
        try:
            facts = json.loads(text)
            return cls(str(facts["fingerprint"]), str(facts["precision"]), str(facts["model"]), int(facts["dim"]))
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be delivered into a table.

    Attributes:
        job: the job's id.
        variant: a word that differs if the same job is delivered otherwise, such as with other ids. A resume point
            counts only for the variant that it was noted for.
        keeps: whether the job has kept fields.
        half: whether vectors are stored as float16.
        allow_mixed: whether the table may hold vectors of another model.
    """

    job: str
    variant: str
    provenance: Provenance
    keeps: bool = False
    half: bool = False
    allow_mixed: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Records for a database. Each has a vector, and no id occurs twice.

    Attributes:
        vectors: float32, records × dimensions; all finite.
        kept: each record's kept fields as a JSON object; None if the job keeps none.
    """

    ids: Sequence[str]
    vectors: Vectors
    kept: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, rows: slice | npt.NDArray[np.int64]) -> Batch:
        """Some of its records."""
        at = np.arange(len(self))[rows].tolist()
        kept = None if self.kept is None else [self.kept[row] for row in at]
        return Batch([self.ids[row] for row in at], self.vectors[at], kept)


@dataclass(frozen=True, slots=True)
class Verified:
    """What a database holds of some records: the ids that it lacks, and those whose vectors are others."""

    missing: Sequence[str] = ()
    different: Sequence[str] = ()


class Sink(ABC):
    """A table of a database that takes records by their ids: a record whose id is there replaces the one there.

    A sink is made from a URL and the settings, which opens nothing. It is used in this order: :meth:`check`,
    :meth:`open`, then :meth:`write` and :meth:`commit` in turns, :meth:`finish`, and :meth:`close` in any case. A batch
    may be written again after any failure, also by another process, and must not double a record.

    Every method raises SinkUnavailable if the database can't be reached or has no room, and SinkRefused if it refuses
    what it is given. Neither may contain a password.
    """

    #: How many records are worth a commit. A batch has a few more, or fewer if they are large.
    rows_per_commit: int = 5_000
    #: The table's URL without secrets, for people.
    name: str
    #: What :meth:`open` was given.
    _target: Target | None = None

    @abstractmethod
    def check(self) -> None:
        """Check beforehand that the database can be reached, as far as that costs nothing.

        Raises:
            MissingExtra: the database's client is not installed.
            OutputError: it can't be written.
        """

    @abstractmethod
    def open(self, target: Target) -> int:
        """Make the table if there is none, and begin to deliver.

        Returns:
            The resume point: how many chunks of this job and variant were committed here; 0 if that is unknown.

        Raises:
            MixedVectors: the table holds another model's vectors, or vectors without a note, and they may not be mixed.
            OutputError: the table has not the columns or the dimensions.
        """

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Hand over a batch. It may be durable only after the next commit."""

    @abstractmethod
    def commit(self, chunks: int) -> None:
        """Make all batches durable, and then, or in the same transaction, note the resume point.

        Args:
            chunks: how many chunks of the job are delivered, from the first one on.
        """

    def recover(self) -> None:  # noqa: B027  (many sinks hold nothing)
        """Get ready for another try after a failed write or commit. What was not committed may be gone."""

    @abstractmethod
    def verify(self, sample: Batch) -> Verified:
        """Read records back by their ids, and compare their vectors."""

    def finish(self) -> None:  # noqa: B027  (many sinks have nothing to do)
        """Called once after the last commit, if anything was written, or after the last :meth:`delete`."""

    def delete(self, ids: Sequence[str]) -> int:
        """Delete records by their ids, durably, between :meth:`open` and :meth:`close`. May be repeated.

        A sink that does not implement it can't delete, which is refused before anything is done.

        Args:
            ids: at least one, and not more than fit into a request. An id that is not there is no error.

        Returns:
            How many were there.
        """
        raise SettingsError(f"{self.name}: this kind of database can't delete records: omit --delete-missing")

    def _needs(self) -> Target:
        assert self._target is not None, "open() comes first"
        return self._target

    @property
    def deletes(self) -> bool:
        """Whether :meth:`delete` is implemented."""
        return type(self).delete is not Sink.delete

    @abstractmethod
    def close(self) -> None:
        """Free what :meth:`open` took. What was not committed may be gone."""


def check_provenance(found: Provenance | None, target: Target, name: str, *, empty: bool) -> bool:
    """Refuse a table with another model's vectors.

    Args:
        found: the table's note; None if it has none.
        name: the table, for the message.
        empty: whether the table has no records.

    Returns:
        Whether the table is to get the job's note.

    Raises:
        MixedVectors: it is another model's, or nobody knows whose.
    """
    if empty:
        return found != target.provenance
    if target.allow_mixed or (found is not None and found.fingerprint == target.provenance.fingerprint):
        return False
    if found is None:
        raise MixedVectors(
            f"{name} holds records, and no note of the model that made their vectors: choose another table, or write "
            "into it all the same with --allow-mixed (allow_mixed= in Python)"
        )
    raise MixedVectors(
        f"{name} holds vectors of {found.model}, {found.precision}, fingerprint {found.fingerprint[:12]}; those of job "
        f"{target.job} are of {target.provenance.model}, {target.provenance.precision}, fingerprint "
        f"{target.provenance.fingerprint[:12]}. Vectors of two models, or of two prompts, can't be compared: choose "
        "another table, or mix them all the same with --allow-mixed (allow_mixed= in Python)"
    )


def compared(sample: Batch, found: Mapping[str, Any], *, half: bool, directions: bool = False) -> Verified:
    """Compare a sample with the vectors that a database gave back, by id.

    Args:
        directions: whether lengths do not count, because the database scales vectors.
    """
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    missing, different = [], []
    for label, wanted in zip(sample.ids, sample.vectors, strict=True):
        if label not in found:
            missing.append(label)
            continue
        is_there = np.asarray(found[label], np.float32)
        if is_there.shape != wanted.shape:
            different.append(label)
            continue
        if directions:
            is_there, wanted = _unit(is_there), _unit(wanted)
        if not np.allclose(is_there, wanted, rtol=0, atol=tolerance * max(1.0, float(np.abs(wanted).max(initial=0)))):
            different.append(label)
    return Verified(missing, different)


def _unit(vector: Vectors) -> Vectors:
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector

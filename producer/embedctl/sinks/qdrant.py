"""`qdrant+http://` and `qdrant://`: a collection of Qdrant, on a server or in a folder."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import numpy as np

from embedctl.sinks.base import NOTE, Batch, Provenance, Sink, Target, Verified, check_provenance, compared
from embedctl.sinks.notes import noted, resume_point
from embedctl.sinks.urls import SinkUrl
from embedctl_config.errors import MissingExtra, OutputError, SettingsError, SinkRefused, SinkUnavailable
from embedctl_config.settings import Settings

try:
    from qdrant_client import QdrantClient, models
    from qdrant_client.common.client_exceptions import QdrantException
    from qdrant_client.http.exceptions import ApiException, UnexpectedResponse
except ImportError as error:
    raise MissingExtra("qdrant", "Qdrant") from error

#: A request has about this much JSON at most; a server refuses 32 MiB.
_REQUEST_BYTES = 8 * 1024 * 1024
#: JSON of a component, at most.
_COMPONENT_BYTES = 24
#: How long a server may take for an answer (seconds).
_ANSWER_S = 60
#: What a collection's metadata calls the resume points.
_PROGRESS = "embedctl_progress"
_DISTANCES = {
    "cosine": models.Distance.COSINE,
    "dot": models.Distance.DOT,
    "euclid": models.Distance.EUCLID,
    "manhattan": models.Distance.MANHATTAN,
}
#: Statuses that may pass: request timeout, too many requests, and what a server has to mend.
_PASSING = (408, 429)


class QdrantSink(Sink):
    """A collection whose points have one unnamed vector, and the payload `id` and the kept fields.

    Every upsert waits until it is applied. A point's number or UUID follows from the record's id, so a batch that is
    written again replaces itself.
    """

    def __init__(self, url: SinkUrl, settings: Settings) -> None:
        self.name = str(url)
        self._options: dict[str, Any]
        if url.scheme == "qdrant":
            url.only("collection", "distance")
            if url.address or not url.path.strip("/"):
                raise SettingsError(f"{url}: write qdrant:///FOLDER?collection=NAME, or qdrant+http:// for a server")
            self._collection = url.needed("collection")
            self._options = {"path": unquote(url.path)}
        else:
            url.only("distance")
            self._collection = unquote(url.path.strip("/"))
            if not url.address or not self._collection or "/" in self._collection:
                raise SettingsError(f"{url}: write {url.scheme}://HOST[:PORT]/COLLECTION")
            self._options = {
                "url": f"{url.scheme.partition('+')[2]}://{url.address}",
                "api_key": settings.qdrant_api_key or None,
                "timeout": _ANSWER_S,
                "check_compatibility": False,
            }
        self._distance = _DISTANCES[url.one_of("distance", tuple(_DISTANCES))]
        self._client: QdrantClient | None = None

    def check(self) -> None:
        with self._explained():
            self._connected().collection_exists(self._collection)

    def open(self, target: Target) -> int:
        self._target = target
        with self._explained():
            client = self._connected()
            if not client.collection_exists(self._collection):
                self._make(client, target)
            found = client.get_collection(self._collection)
            self._check_vectors(found.config.params.vectors, target)
            metadata = found.config.metadata or {}
            empty = client.count(self._collection, exact=True).count == 0
            provenance = Provenance.from_json(json.dumps(metadata.get(NOTE)))
            if check_provenance(provenance, target, self.name, empty=empty):
                client.update_collection(self._collection, metadata=_note_of(target))
                self._check_noted(client, target)
            return resume_point(_progress_in(metadata), target.job, target.variant)

    def write(self, batch: Batch) -> None:
        with self._explained():
            client = self._connected()
            kind = np.float16 if self._needs().half else np.float32
            for part in self._requests(batch):
                points = models.Batch(
                    ids=[self._point(label) for label in part.ids],
                    vectors=part.vectors.astype(kind, copy=False).tolist(),
                    payloads=_payloads(part),
                )
                client.upsert(self._collection, points, wait=True)

    def commit(self, chunks: int) -> None:
        with self._explained():
            client, target = self._connected(), self._needs()
            metadata = client.get_collection(self._collection).config.metadata or {}
            progress = noted(_progress_in(metadata), target.job, target.variant, chunks)
            client.update_collection(self._collection, metadata={_PROGRESS: progress})

    def verify(self, sample: Batch) -> Verified:
        with self._explained():
            points = {self._point(label): label for label in sample.ids}
            found = self._connected().retrieve(self._collection, list(points), with_payload=False, with_vectors=True)
        vectors = {points[each.id if isinstance(each.id, int) else str(each.id)]: each.vector for each in found}
        return compared(sample, vectors, half=self._needs().half, directions=self._distance is models.Distance.COSINE)

    def delete(self, ids: Sequence[str]) -> int:
        with self._explained():
            client = self._connected()
            points = [self._point(label) for label in ids]
            found = client.retrieve(self._collection, points, with_payload=False, with_vectors=False)
            if found:
                client.delete(self._collection, models.PointIdsList(points=[each.id for each in found]), wait=True)
        return len(found)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> QdrantClient:
        if self._client is None:
            self._client = QdrantClient(**self._options)
        return self._client

    def _make(self, client: QdrantClient, target: Target) -> None:
        kind = models.Datatype.FLOAT16 if target.half else models.Datatype.FLOAT32
        vectors = models.VectorParams(size=target.provenance.dim, distance=self._distance, datatype=kind)
        try:
            client.create_collection(self._collection, vectors_config=vectors, metadata=_note_of(target))
        except (UnexpectedResponse, ValueError):
            if not client.collection_exists(self._collection):  # another process may have made it
                raise
        self._check_noted(client, target)

    def _check_noted(self, client: QdrantClient, target: Target) -> None:
        noted_as = client.get_collection(self._collection).config.metadata or {}
        if noted_as.get(NOTE) != _note_of(target)[NOTE]:
            raise OutputError(
                f"{self.name}: the server does not keep the metadata of a collection, which says what model its "
                "vectors are of: Qdrant 1.16 or newer does"
            )

    def _check_vectors(self, vectors: object, target: Target) -> None:
        if not isinstance(vectors, models.VectorParams):
            raise OutputError(
                f"{self.name}: the collection has named vectors, or none: choose another one, which is made if it "
                "does not exist"
            )
        half = vectors.datatype is models.Datatype.FLOAT16
        if vectors.size != target.provenance.dim or half is not target.half:
            kind = "float16" if half else "float32"
            raise OutputError(
                f"{self.name}: the collection has {kind} vectors of {vectors.size} dimensions, and the job's have "
                f"{target.provenance.dim}{' and are to be float16' if target.half else ''}: choose another one"
            )
        self._distance = vectors.distance

    def _point(self, label: str) -> int | str:
        return point_id(self._collection, label)

    def _requests(self, batch: Batch) -> Iterator[Batch]:
        """The batch in parts that a server takes."""
        begin = size = 0
        row_bytes = _COMPONENT_BYTES * self._needs().provenance.dim + 100
        for row, label in enumerate(batch.ids):
            own = row_bytes + len(label) + (0 if batch.kept is None else len(batch.kept[row]))
            if row > begin and size + own > _REQUEST_BYTES:
                yield batch.part(slice(begin, row))
                begin, size = row, 0
            size += own
        yield batch.part(slice(begin, None))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UnexpectedResponse as error:
            status = error.status_code or 0
            if status in (401, 403):
                raise SinkUnavailable(
                    f"{self.name}: the server does not let this client in ({status}): set QDRANT_API_KEY"
                ) from error
            words = f"{status} {error.reason_phrase}: {_said(error.content)}"
            if status in _PASSING or status >= 500:
                raise SinkUnavailable(f"{self.name}: {words}") from error
            raise SinkRefused(f"{self.name} refuses it: {words}") from error
        except (ApiException, QdrantException) as error:  # also: it asks to come again later
            raise SinkUnavailable(f"{self.name} can't be reached: {_first_line(error)}") from error
        except OSError as error:
            raise SinkUnavailable(f"{self.name}: {error.strerror or _first_line(error)}") from error
        except RuntimeError as error:  # a folder that another process uses
            raise SinkUnavailable(f"{self.name}: {_first_line(error)}") from error
        except ValueError as error:  # the client's own checks, and those of local mode
            raise SinkRefused(f"{self.name} refuses it: {_first_line(error)}") from error


def point_id(collection: str, label: str) -> int | str:
    """The id of a record's point: Qdrant takes whole numbers of 64 bits and UUIDs alone.

    Two different labels never have the same point: only the usual spelling of a number or a UUID stands for itself.
    """
    if label.isascii() and label.isdecimal() and len(label) <= 20 and str(int(label)) == label and int(label) < 2**64:
        return int(label)
    try:
        if str(uuid.UUID(label)) == label:
            return label
    except ValueError:
        pass
    space = uuid.uuid5(uuid.NAMESPACE_URL, f"embedctl:{collection}")
    return str(uuid.uuid5(space, label))


def _payloads(batch: Batch) -> list[dict[str, Any]]:
    kept: Sequence[str] = batch.kept or ["{}"] * len(batch)
    return [{**json.loads(fields), "id": label} for label, fields in zip(batch.ids, kept, strict=True)]


def _note_of(target: Target) -> dict[str, Any]:
    return {NOTE: json.loads(target.provenance.to_json())}


def _progress_in(metadata: dict[str, Any]) -> dict[str, Any]:
    found = metadata.get(_PROGRESS)
    return found if isinstance(found, dict) else {}


def _said(content: bytes) -> str:
    """What a server says, on one line and not at length."""
    return " ".join(content.decode(errors="replace").split())[:300]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__

"""`qdrant+http://` and `qdrant://`: a collection of Qdrant, on a server or in a folder."""

from __future__ import annotations

import json
import ssl
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import numpy as np

from embedctl.destinations.interface import Batch, Contract, Destination, Row, source_of_text, source_to_text
from embedctl.destinations.urls import DestinationUrl
from embedctl_config.errors import (
    DestinationRefused,
    DestinationUnavailable,
    MissingExtra,
    OutputError,
    SettingsError,
)
from embedctl_config.outputs import PLAIN, Output
from embedctl_config.record_ids import IdType, RecordId, as_text, from_json, to_json
from embedctl_config.settings import Settings

try:
    from qdrant_client import QdrantClient, models
    from qdrant_client.common.client_exceptions import QdrantException
    from qdrant_client.http.exceptions import ApiException, UnexpectedResponse
except ImportError as error:
    raise MissingExtra("qdrant", "Qdrant") from error

#: The contract in a collection's metadata, with the name under which it was made; and the source in a point's payload,
#: as hexadecimal.
_CONTRACT, _MADE_AS, _SOURCE = "embedctl", "made_as", "embedctl_source"
#: How long a server may take for an answer (seconds).
_ANSWER_S = 60
#: Points that are listed together.
_LISTED = 1_000
_DISTANCES = ("cosine", "dot", "euclid", "manhattan")
#: Statuses that may pass: request timeout, too many requests, and what a server has to mend.
_PASSING = (408, 429)
#: No record is to blame for it.
_GONE = 404


class QdrantCollection(Destination):
    """A collection, or an alias of one, whose points have one unnamed vector, or several that are called `dense`,
    `sparse` and `multi` (which compares by the most similar vectors), and as payload `id`, the source and kept fields.

    A collection is made with its contract in one step, and only one process can make it. An alias would not do: a
    second creator moves it, also when the first one has come to its end. A point's number or UUID follows from the
    record's id, so a batch that is written again replaces itself.
    """

    #: A server refuses requests of 32 MiB. JSON takes up to 24 bytes for each component of 4.
    batch_bytes = 1_400_000
    outputs = tuple(Output)
    instead = ", and let the collection quantise them (`quantization_config`)"

    def __init__(self, url: DestinationUrl, settings: Settings) -> None:
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
            if url.scheme == "qdrant+http":  # or the client would read all of the system's certificates for nothing
                self._options["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._distance = models.Distance(url.one_of("distance", _DISTANCES).capitalize())
        self._client: QdrantClient | None = None
        self._contract = Contract("", "", "", {}, 0)
        self._made_as = self._collection

    def open(self, contract: Contract | None) -> bool:
        with self._explained() as client:
            found = client.collection_exists(self._collection)
            if contract is None:
                return False
            self._contract = contract
            if not found:
                if not contract.is_sized:
                    return False
                self._make(client)
            info = self._bound(client)
            bound = (info.metadata or {})[_CONTRACT]
            self._made_as = bound.get(_MADE_AS, self._collection)
            self.take_ids(IdType.named(bound.get("ids", "")), contract)
            self._check_vectors(info.params)
            return client.count(self._collection, exact=True).count > 0

    def sources(self, ids: Sequence[RecordId]) -> Mapping[RecordId, bytes | None]:
        with self._explained() as client:
            points = client.retrieve(
                self._collection,
                [self._point(label) for label in ids],
                with_payload=["id", _SOURCE],
                with_vectors=False,
            )
            return dict(map(self._row_of, points))

    def ids(self) -> Iterator[Row]:
        after: Any = None
        while True:
            with self._explained() as client:
                points, after = client.scroll(
                    self._collection, limit=_LISTED, offset=after, with_payload=["id", _SOURCE], with_vectors=False
                )
            yield from map(self._row_of, points)
            if after is None:
                return

    def write(self, batch: Batch) -> None:
        with self._explained() as client:
            points = models.Batch(
                ids=[self._point(label) for label in batch.ids],
                vectors=_vectors(batch, self._contract),
                payloads=list(_payloads(batch)),
            )
            self._bound(client)
            client.upsert(self._collection, points, wait=True, ordering=models.WriteOrdering.STRONG)
            self._bound(client)  # it may just have been replaced, and nobody is to count on these rows then

    def delete(self, rows: Sequence[Row]) -> int:
        same = models.Filter(should=[self._is_still(*row) for row in rows])
        with self._explained() as client:
            found = client.count(self._collection, count_filter=same, exact=True).count
            if found:
                selected = models.FilterSelector(filter=same)
                client.delete(self._collection, selected, wait=True, ordering=models.WriteOrdering.STRONG)
            return found

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _bound(self, client: QdrantClient) -> models.CollectionConfig:
        """What the collection is now; OtherContract unless it is bound to this contract."""
        config = client.get_collection(self._collection).config
        facts = json.dumps((config.metadata or {}).get(_CONTRACT))
        self._contract.refuse_other(Contract.from_json(facts), self.name)
        return config

    def _make(self, client: QdrantClient) -> None:
        vectors, sparse = self._params(self._contract.sizes)
        metadata = {_CONTRACT: {**json.loads(self._contract.text), _MADE_AS: self._collection}}
        try:
            client.create_collection(self._collection, vectors, sparse_vectors_config=sparse, metadata=metadata)
        except (UnexpectedResponse, ValueError):
            if not client.collection_exists(self._collection):  # another process may have made it
                raise
            return
        if client.get_collection(self._collection).config.metadata is None:
            raise OutputError(f"{self.name}: the server keeps no word on a collection's vectors: Qdrant 1.16 does")

    def _params(self, sizes: Mapping[Output, int]) -> tuple[Any, Any]:
        """The parameters of dense and multi-vectors, by name unless all are dense, and of sparse ones."""
        kind = models.Datatype.FLOAT16 if self._contract.dtype == "float16" else models.Datatype.FLOAT32
        most = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        named = {
            str(output): models.VectorParams(
                size=size,
                distance=self._distance,
                datatype=kind,
                multivector_config=most if output is Output.MULTI else None,
            )
            for output, size in sizes.items()
            if output is not Output.SPARSE
        }
        if tuple(sizes) == PLAIN:
            return named[Output.DENSE], None
        return named, {str(Output.SPARSE): models.SparseVectorParams()} if Output.SPARSE in sizes else None

    def _check_vectors(self, params: models.CollectionParams) -> None:
        """Take the distance that the collection has; OutputError unless its vectors are still those of the contract."""
        there = params.vectors if isinstance(params.vectors, dict) else {str(Output.DENSE): params.vectors}
        known = {name: each for name, each in there.items() if isinstance(each, models.VectorParams)}
        self._distance = next((each.distance for each in known.values()), self._distance)
        sizes = {Output(name): each.size for name, each in known.items() if name in tuple(Output)}
        sizes |= dict.fromkeys(map(Output, params.sparse_vectors or ()), self._contract.sparse_dim)
        is_half = self._contract.dtype == "float16"
        other = {each.datatype is models.Datatype.FLOAT16 for each in known.values()} - {is_half}
        wanted = self._contract.sizes
        if other or sizes.keys() != wanted.keys() or any(wanted[each] not in (0, size) for each, size in sizes.items()):
            raise OutputError(f"{self.name}: the collection {self._collection} was changed: it has {params.vectors}")

    def _point(self, label: RecordId) -> int | str:
        # By the name with which it was made, which stays the same behind an alias.
        return point_id(self._made_as, as_text(label))

    def _is_still(self, label: RecordId, source: bytes | None) -> models.Filter:
        same: models.Condition = models.IsEmptyCondition(is_empty=models.PayloadField(key=_SOURCE))
        if source is not None:
            same = models.FieldCondition(key=_SOURCE, match=models.MatchValue(value=source_to_text(source)))
        return models.Filter(must=[models.HasIdCondition(has_id=[self._point(label)]), same])

    def _row_of(self, point: models.Record) -> Row:
        payload = point.payload or {}
        source, name = payload.get(_SOURCE), payload.get("id", point.id)
        try:
            label = from_json(self.id_type.kind, name)
        except ValueError:
            label = str(name)
        if self._point(label) != point.id:  # another program's
            label = str(point.id)
        return label, None if source is None else source_of_text(str(source))

    @contextmanager
    def _explained(self) -> Iterator[QdrantClient]:
        try:
            if self._client is None:
                self._client = QdrantClient(**self._options)
            yield self._client
        except UnexpectedResponse as error:
            status = error.status_code or 0
            if status in (401, 403):
                raise DestinationUnavailable(
                    f"{self.name}: the server does not let this client in ({status}): set QDRANT_API_KEY"
                ) from error
            words = f"{status} {error.reason_phrase}: {_said(error.content)}"
            if status in _PASSING or status >= 500:
                raise DestinationUnavailable(f"{self.name}: {words}") from error
            if status == _GONE:
                raise OutputError(f"{self.name}: it is not there, or was deleted meanwhile: {words}") from error
            raise DestinationRefused(f"{self.name} refuses it: {words}") from error
        except (ApiException, QdrantException) as error:  # also: it asks to come again later
            raise DestinationUnavailable(f"{self.name} can't be reached: {_first_line(error)}") from error
        except OSError as error:
            raise DestinationUnavailable(f"{self.name}: {error.strerror or _first_line(error)}") from error
        except RuntimeError as error:  # a folder that another process uses
            raise DestinationUnavailable(f"{self.name}: {_first_line(error)}") from error
        except ValueError as error:  # the client's own checks, and those of local mode
            raise DestinationRefused(f"{self.name} refuses it: {_first_line(error)}") from error


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


def _vectors(batch: Batch, contract: Contract) -> Any:
    """The vectors of a batch: unnamed dense ones, or those of each kind by its name."""
    if contract.outputs == PLAIN:
        return batch.vectors.tolist()
    named: dict[str, list[Any]] = {}
    if Output.DENSE in contract.outputs:
        named[str(Output.DENSE)] = batch.vectors.tolist()
    if (sparse := batch.sparse) is not None:
        indices, weights = (np.split(each, sparse.starts[1:-1]) for each in (sparse.indices, sparse.weights))
        pairs = zip(indices, weights, strict=True)
        named[str(Output.SPARSE)] = [models.SparseVector(indices=i.tolist(), values=w.tolist()) for i, w in pairs]
    if (multi := batch.multi) is not None:
        named[str(Output.MULTI)] = [rows.tolist() for rows in np.split(multi.vectors, multi.starts[1:-1])]
    return named


def _payloads(batch: Batch) -> Iterator[dict[str, Any]]:
    kept: Sequence[str] = batch.kept or ["{}"] * len(batch)
    for (label, source), fields in zip(batch.rows, kept, strict=True):
        yield {
            **json.loads(fields),
            "id": to_json(label),
            **({} if source is None else {_SOURCE: source_to_text(source)}),
        }


def _said(content: bytes) -> str:
    return " ".join(content.decode(errors="replace").split())[:300]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__

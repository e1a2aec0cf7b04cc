"""A stand-in for Qdrant's server: its REST interface, as far as we use it, on the client's own local mode.

It is stricter than local mode where the server is: an id is a number of 64 bits or a UUID, and a request has at most
32 MiB. It is no proof of what the real server does.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: What the real server refuses.
MOST_BYTES = 32 * 1024 * 1024


class QdrantServer:
    """A server that answers on loopback until it is stopped.

    Attributes:
        client: the local mode behind it.
        requests: by method and kind, such as `PUT points`.
        faults: what happens to the next upserts: a status, or `lost` for an answer that does not come.
        key: the API key that requests must have; None for none.
    """

    def __init__(self) -> None:
        from qdrant_client import QdrantClient

        self.client = QdrantClient(":memory:")
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.faults: list[int | str] = []
        self.largest = 0
        self.key: str | None = None
        outer = self

        class Handler(_Handler):
            server_state = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"127.0.0.1:{self._http.server_address[1]}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.client.close()


@contextmanager
def qdrant_server() -> Iterator[QdrantServer]:
    server = QdrantServer()
    yield server
    server.stop()


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection. Bodies are what the client's models make of them."""

    protocol_version = "HTTP/1.1"
    server_state: QdrantServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class' name)
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    do_PUT = do_PATCH = do_POST = do_DELETE = do_GET  # noqa: N815  (the base class' names)

    def _answer(self) -> None:
        state = self.server_state
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        parts = path.strip("/").split("/")
        kind = "/".join(["collection", *parts[2:]]) if len(parts) > 1 else path
        if path == "/collections/aliases":
            kind = path
        with state.lock:
            state.requests[f"{self.command} {kind}"] += 1
            state.largest = max(state.largest, len(body))
            is_upsert = f"{self.command} {kind}" == "PUT collection/points"
            fault = state.faults.pop(0) if state.faults and is_upsert else None
            try:
                self._check(body, fault)
                result = self._result(
                    f"{self.command} {kind}", parts[-1 if len(parts) < 2 else 1], query, json.loads(body or b"null")
                )
            except _Refused as error:
                self._send(error.status, {"status": {"error": str(error)}, "time": 0.0})
                return
            except ValueError as error:
                message = str(error)
                self._send(404 if "not found" in message else 400, {"status": {"error": message}, "time": 0.0})
                return
        if fault == "lost":
            self.close_connection = True
            self.connection.close()
            return
        self._send(200, {"result": result, "status": "ok", "time": 0.0})

    def _check(self, body: bytes, fault: int | str | None) -> None:
        state = self.server_state
        if state.key is not None and self.headers.get("api-key") != state.key:
            raise _Refused(401, "Must provide an API key or an Authorization bearer token")
        if len(body) > MOST_BYTES:
            raise _Refused(413, "Payload too large")
        if isinstance(fault, int):
            raise _Refused(fault, "told to fail")

    def _send(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # the client was killed
            self.wfile.write(data)

    def _result(self, what: str, name: str, query: dict[str, list[str]], body: Any) -> Any:
        from qdrant_client import models

        client = self.server_state.client
        if what == "GET /aliases":
            return client.get_aliases().model_dump(mode="json")
        if what == "POST /collections/aliases":
            actions = [models.CreateAliasOperation.model_validate(each) for each in body["actions"]]
            return client.update_collection_aliases(actions)
        if what == "GET collection/exists":
            return {"exists": client.collection_exists(name)}
        if what == "GET collection":
            return client.get_collection(name).model_dump(mode="json")
        if what == "PUT collection":
            asked = models.CreateCollection.model_validate(body)
            return client.create_collection(name, asked.vectors, asked.sparse_vectors, metadata=asked.metadata)
        if what == "PATCH collection":
            return client.update_collection(name, metadata=body["metadata"])
        if what == "DELETE collection":
            return client.delete_collection(name)
        if what == "POST collection/points/count":
            return {"count": client.count(name, count_filter=_filter(body.get("filter")), exact=True).count}
        if what == "POST collection/points":
            found = client.retrieve(name, body["ids"], with_payload=body["with_payload"], with_vectors=True)
            return [record.model_dump(mode="json") for record in found]
        if what == "POST collection/points/scroll":
            points, after = client.scroll(
                name, limit=body["limit"], offset=body.get("offset"), with_payload=body["with_payload"]
            )
            return {"points": [record.model_dump(mode="json") for record in points], "next_page_offset": after}
        if what == "PUT collection/points":
            if query.get("wait") != ["true"] or query.get("ordering") != ["strong"]:
                raise _Refused(400, "an upsert must be waited for, and strongly ordered")
            batch = models.Batch.model_validate(body["batch"])
            for point in batch.ids:
                _check_id(point)
            client.upsert(name, batch)
            return {"operation_id": 0, "status": "completed"}
        if what == "POST collection/points/delete":
            if query.get("wait") != ["true"] or query.get("ordering") != ["strong"]:
                raise _Refused(400, "a deletion must be waited for, and strongly ordered")
            client.delete(name, models.FilterSelector.model_validate(body))
            return {"operation_id": 0, "status": "completed"}
        raise _Refused(404, f"the stand-in does not know {what}")


def _filter(body: Any) -> Any:
    from qdrant_client import models

    return None if body is None else models.Filter.model_validate(body)


def _check_id(point: int | str | uuid.UUID) -> None:
    if isinstance(point, int):
        if not 0 <= point < 2**64:
            raise _Refused(400, f"{point} is not a valid point ID")
        return
    try:
        uuid.UUID(str(point))
    except ValueError:
        raise _Refused(400, f"{point} is not a valid point ID") from None

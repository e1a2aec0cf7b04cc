"""A model hub on loopback that speaks as much of the real one's protocol as its client uses to download a model.

Large files are answered with a redirect to a second server of another host name, as the hub's are to its stores. Both
servers break, refuse and lie as told.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = ("*.safetensors", "*.bin")
TOKEN = "hf_of-this-test-alone"


@dataclass(frozen=True)
class Asked:
    """A request that came: to `hub` or to `store`, with the names of its headers in lower case."""

    server: str
    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class StandInHub:
    """The hub's state, and what it is to do wrong.

    Attributes:
        models: repository → revision → commit; `contents`: (repository, commit) → name → bytes.
        private, gated: repositories that are shown, or given, only to those with the token.
        refusals: status and headers of the next answers about anything, in order.
        cuts: after how many bytes the next downloads of large files break off, in order.
        paused: after how many bytes the next download of a large file waits for `resumed`; None: it does not.
        wrong: names of files that come with other contents of the same size.
        extra: siblings that are listed too, as they stand in the listing.
    """

    models: dict[str, dict[str, str]] = field(default_factory=dict)
    contents: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    paused: int | None = None
    resumed: threading.Event = field(default_factory=threading.Event)
    wrong: set[str] = field(default_factory=set)
    extra: list[dict[str, Any]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    store_url: str = ""

    def put(self, repository: str, files: Mapping[str, bytes], *, revision: str = "main") -> str:
        """Let a revision be these files; returns its commit."""
        commit = hashlib.sha1(json.dumps([(name, _sha1(data)) for name, data in sorted(files.items())]).encode())
        self.models.setdefault(repository, {})[revision] = commit.hexdigest()
        self.contents[repository, commit.hexdigest()] = dict(files)
        return commit.hexdigest()

    def downloads(self) -> list[str]:
        """The names of the files whose contents were asked for, in order."""
        got = [unquote(urlsplit(each.path).path) for each in self.asked if each.method == "GET"]
        return [path.split("/resolve/")[1].partition("/")[2] for path in got if "/resolve/" in path]

    def environment(self, home: object) -> dict[str, str]:
        """The variables of a process whose hub this is."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}

    def commit(self, repository: str, revision: str) -> str | None:
        known = self.models.get(repository, {})
        return known.get(revision, revision if (repository, revision) in self.contents else None)

    def siblings(self, repository: str, commit: str) -> list[dict[str, Any]]:
        listed = []
        for name, data in self.contents[repository, commit].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _sha1(data)}
            if is_large(name):
                entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
            listed.append(entry)
        return listed + self.extra


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """A hub that runs until the block ends."""
    hub = StandInHub()
    servers = [_server(hub, kind) for kind in ("hub", "store")]
    hub.url, hub.store_url = (
        f"http://{host}:{server.server_port}" for host, server in zip(HOSTS, servers, strict=True)
    )
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.resumed.set()
        for server in servers:
            server.shutdown()
            server.server_close()


#: Two names of one address.
HOSTS = ("127.0.0.1", "localhost")


def is_large(name: str) -> bool:
    """Whether a file is stored outside of Git."""
    return any(fnmatch(name, pattern) for pattern in LARGE)


def _server(hub: StandInHub, kind: str) -> ThreadingHTTPServer:
    class Handler(_Handler):
        state, server_kind = hub, kind

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: StandInHub
    server_kind: str

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base's name)
        pass

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.state.asked.append(Asked(self.server_kind, self.command, self.path, headers))
        if self.state.refusals:
            status, more = self.state.refusals.pop(0)
            self._send(status, b'{"error": "not now"}', more)
            return
        url = urlsplit(self.path)
        path = unquote(url.path).strip("/")
        if self.server_kind == "store":
            self._store(path)
        elif path.startswith("api/models/"):
            self._api(path.removeprefix("api/models/"), parse_qs(url.query))
        else:
            repository, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            self._resolve(repository, revision, name)

    def _permitted(self, repository: str) -> bool:
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not known and (repository in self.state.private or repository not in self.state.models):
            self._send(401, b"{}", {"X-Error-Message": "Invalid username or password."})
            return False
        if repository not in self.state.models:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return False
        if not known and repository in self.state.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return False
        return True

    def _api(self, path: str, query: Mapping[str, Sequence[str]]) -> None:
        kind = "/tree/" if "/tree/" in path else "/revision/"
        repository, _, revision = path.partition(kind)
        if not self._permitted(repository):
            return
        commit = self.state.commit(repository, revision or "main")
        if commit is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = self.state.siblings(repository, commit)
        if kind == "/tree/":
            self._send(200, json.dumps([_of_tree(each) for each in siblings]).encode())
            return
        if "blobs" not in query:
            siblings = [{"rfilename": each["rfilename"]} for each in siblings]
        answer = {"id": repository, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        self._send(200, json.dumps(answer).encode())

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        if not self._permitted(repository):
            return
        commit = self.state.commit(repository, revision)
        data = self.state.contents.get((repository, commit or ""), {}).get(name)
        if data is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        elif is_large(name):
            digest = hashlib.sha256(data).hexdigest()
            where = {"Location": f"{self.state.store_url}/{repository}/{commit}/{name}?Signature=of-the-address"}
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "X-Repo-Commit": str(commit)}
            self._send(302, b"", {**where, **linked})
        else:
            self._contents(name, data, {"ETag": f'"{_sha1(data)}"', "X-Repo-Commit": str(commit)})

    def _store(self, path: str) -> None:
        organisation, name, commit, file = path.split("/", 3)
        data = self.state.contents[f"{organisation}/{name}", commit][file]
        self._contents(file, data, {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def _contents(self, name: str, data: bytes, headers: Mapping[str, str]) -> None:
        if name in self.state.wrong:
            data = bytes(len(data))
        begin, status = 0, 200
        if ranged := self.headers.get("Range", ""):
            begin, status = int(ranged.removeprefix("bytes=").partition("-")[0]), 206
            headers = {**headers, "Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
        self._send(status, data[begin:], {**headers, "Accept-Ranges": "bytes"}, breaks=is_large(name))

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}, *, breaks: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(OSError):  # the client was killed
            if breaks and self.state.paused is not None:
                at, self.state.paused = self.state.paused, None
                self.wfile.write(body[:at])
                self.wfile.flush()
                self.state.resumed.wait(60)
                body = body[at:]
            elif breaks and self.state.cuts:
                body = body[: self.state.cuts.pop(0)]
                self.close_connection = True
            self.wfile.write(body)


def _of_tree(sibling: Mapping[str, Any]) -> dict[str, Any]:
    entry = {"type": "file", "path": sibling["rfilename"], "size": sibling["size"], "oid": sibling["blobId"]}
    if lfs := sibling.get("lfs"):
        entry["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
    return entry


def _sha1(data: bytes) -> str:
    """Git's name of a blob."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()

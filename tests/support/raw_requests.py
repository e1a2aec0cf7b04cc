"""Requests as bytes, right ones and mutated ones, and what a server answers to them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

#: A server that says nothing for so long waits for more (seconds).
SILENT_S = 0.25
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_NUMBERS = (b"-1", b"+5", b"0x10", b"1e3", b"5, 5", b"5, 6", b"99999999999999999999999", b"", b" ", b"\x00", b"\xb2")
_CODINGS = (
    b"chunked",
    b"gzip, chunked",
    b"chunked, chunked",
    b"identity",
    b"xchunked",
    b"chunked\x00",
    b"\tchunked",
    b"",
)
_LINES = (
    b"GET / HTTP/0.9",
    b"PRI * HTTP/2.0",
    b"POST /v1/embeddings",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"CONNECT 127.0.0.1:80 HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"GET http://127.0.0.1/v1/models HTTP/1.1",
    b"GET //v1/models HTTP/1.1",
    b"GET /v1/models/%00%ff%2e%2e%2f HTTP/1.1",
    b"GET /v1/models/\xff HTTP/1.1",
    b"GET /v1/files?limit=%00&after=\xf0 HTTP/1.1",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
    b"get /v1/models HTTP/1.1",
    b"GET\t/v1/models\tHTTP/1.1",
    b"GET /v1/models HTTP/1.10",
)
_HEADERS = (
    b"no colon",
    b"name : value",
    b": value",
    b" folded",
    b"x\x00y: z",
    b"x: \x00",
    b"x: \xff\xfe",
    b"x: " + b"a" * 40_000,
    b"host: other\r\nhost: another",
    b"expect: 100-continue",
    b"expect: 200-maybe",
    b"upgrade: websocket\r\nconnection: upgrade",
    b"upgrade: h2c\r\nconnection: upgrade, http2-settings",
    b"content-encoding: gzip",
    b"content-type: multipart/form-data; boundary=" + b"b" * 300,
    b"content-type: multipart/form-data; boundary=b",
    b"content-type: \x00/\xff",
    b"range: bytes=-0,1-,9-1",
    b"range: bytes=99999999999999999999999-",
    b"if-range: \xff",
    b"idempotency-key: \xff\x01",
    b"x-stainless-retry-count: \xff",
    b"accept: \xff;q=nan",
    b"origin: http://[::1",
    b"authorization: Bearer \xff",
)
_VALUES = (
    b"NaN", b"1e999", b"-0", b"1" * 400, b'"\\ud800"', b'"\\u0000"', b"null", b"[]", b"{}", b"true",
    b"[" * 900 + b"]" * 900, b"[" * 5000, b'{"a":' * 2000, b'"\xff"', b'"x"' b"," * 70_000, b"[1,2]", b"\xef\xbb\xbf{}",
)  # fmt: skip

Mutation = Callable[[random.Random, bytes, bytes], tuple[bytes, bytes]]


def requests_of(token: str, ids: Sequence[str]) -> list[bytes]:
    """Right requests of every kind, with a key. `ids` are those of files and batches that are there."""
    bodies: list[tuple[str, bytes]] = [
        ("POST /v1/embeddings", _json({"model": "dummy", "input": "a text"})),
        ("POST /embeddings", _json({"model": "dummy", "input": ["a", "b"], "encoding_format": "base64"})),
        ("POST /embed", _json({"inputs": ["a"], "normalize": False})),
        ("POST /pooling", _json({"model": "dummy", "input": ["a"], "truncate_prompt_tokens": -1})),
        ("POST /embed_sparse", _json({"inputs": ["a"], "truncate": True})),
        ("POST /predict", _json({"inputs": ["a"]})),
        ("POST /v1/jobs", _json({"model": "dummy", "dry_run": True})),
        ("POST /v1/batches", _json({"input_file_id": ids[0], "endpoint": "/v1/embeddings", "completion_window": "1h"})),
        ("PUT /v1/jobs/20260101-000000-0000000000/chunks/0?token=a", b"EMBC\x01" + bytes(64)),
        ("POST /v1/jobs/20260101-000000-0000000000/steps/seal", _json({"token": "a", "chunks": 1})),
        *((f"GET /v1/{kind}/{each}{more}", b"") for each in ids for kind, more in (("files", ""), ("batches", ""))),
        *((f"GET /v1/files/{each}/content", b"") for each in ids),
        *((f"GET /v1/batches/{each}/results?after=1.2.3", b"") for each in ids),
        *(
            (f"GET {each}", b"")
            for each in ("/v1/models", "/v1/files?limit=3", "/v1/batches?after=x", "/info", "/metrics")
        ),
        *((f"GET {each}", b"") for each in ("/health", "/ready", "/openapi.json", "/docs")),
    ]
    found = [_request(line, body, token) for line, body in bodies]
    form = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    form += b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n{"custom_id": "a"}\r\n--b--\r\n'
    return [*found, _request("POST /v1/files", form, token, "multipart/form-data; boundary=b")]


def mutated(draw: random.Random, requests: Sequence[bytes]) -> bytes:
    """What a hostile client might send: one request or several in a row, each right, or wrong in up to three ways."""
    return b"".join(_mutated(draw, draw.choice(requests)) for _ in range(draw.choice((1, 1, 1, 1, 1, 2, 3))))


async def answers_to(port: int, sent: Sequence[bytes], draw: random.Random, together: int = 48) -> Counter[int]:
    """Send each on a connection of its own, so many at a time; how often each status was answered. 0: no answer."""
    statuses: Counter[int] = Counter()
    room = asyncio.Semaphore(together)

    async def one(data: bytes, *, is_split: bool, is_reset: bool) -> None:
        async with room:
            statuses.update(await _answers(port, data, is_split=is_split, is_reset=is_reset))

    await asyncio.gather(*(one(each, is_split=draw.random() < 0.2, is_reset=draw.random() < 0.2) for each in sent))
    return statuses


async def _answers(port: int, data: bytes, *, is_split: bool, is_reset: bool) -> list[int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = bytearray()
    with suppress(ConnectionError, TimeoutError):
        at = len(data) // 2 if is_split else len(data)
        writer.write(data[:at])
        if data[at:]:
            await asyncio.sleep(0.01)
            writer.write(data[at:])
        while True:
            async with asyncio.timeout(SILENT_S if got or is_reset else 12 * SILENT_S):
                piece = await reader.read(65536)
            if not piece:
                break
            got += piece
    if is_reset:
        writer.transport.abort()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return [int(each) for each in _STATUS.findall(got)] or [0]


def _json(fields: object) -> bytes:
    return json.dumps(fields).encode()


def _request(line: str, body: bytes, token: str, kind: str = "application/json") -> bytes:
    heads = [f"{line} HTTP/1.1", "host: localhost", f"authorization: Bearer {token}"]
    if body:
        heads += [f"content-type: {kind}", f"content-length: {len(body)}"]
    return "\r\n".join([*heads, "", ""]).encode() + body


def _mutated(draw: random.Random, request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        head, body = draw.choice(_MUTATIONS)(draw, head, body)
    end = b"\r\n\r\n" if draw.random() < 0.97 else draw.choice((b"\n\n", b"\r\r", b"\r\n", b""))
    return head + end + body


def _other_line(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return b"\r\n".join([draw.choice(_LINES), *head.split(b"\r\n")[1:]]), body


def _other_header(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    lines = head.split(b"\r\n")
    lines.insert(draw.randint(1, len(lines)), draw.choice(_HEADERS))
    return b"\r\n".join(lines), body


def _many_headers(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return head + b"".join(b"\r\nx-%d: y" % number for number in range(draw.choice((50, 500, 5000)))), body


def _other_length(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    told = draw.choice((*_NUMBERS, b"%d" % (len(body) + draw.choice((-1, 1, 100_000))), b"%d" % len(body)))
    kept = [each for each in head.split(b"\r\n") if not each.startswith(b"content-length") or draw.random() < 0.3]
    return b"\r\n".join([*kept, b"content-length: " + told]), body


def _chunked(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """A body in chunks, at times beside a length, and at times with sizes that are none."""
    kept = [each for each in head.split(b"\r\n") if not each.startswith(b"content-length") or draw.random() < 0.3]
    coding = b"chunked" if draw.random() < 0.7 else draw.choice(_CODINGS)
    at = draw.randint(0, len(body))
    sizes = [b"%x" % at, b"%x" % (len(body) - at), b"0"]
    if draw.random() < 0.5:
        odd = (b"-1", b"0x5", b"fffffffffffffffffffff", b"", b"g", b"5;x=\x00", b"5" + b";x" * 20_000, b"+1", b"0" * 30)
        sizes[draw.randrange(3)] = draw.choice(odd)
    end = draw.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b""))
    trailer = draw.choice((b"", b"", b"x: y\r\n", b"content-length: 3\r\n", b"t: " + b"a" * 40_000 + b"\r\n"))
    chunks = sizes[0] + end + body[:at] + end + sizes[1] + end + body[at:] + end + sizes[2] + end + trailer + b"\r\n"
    return b"\r\n".join([*kept, b"transfer-encoding: " + coding]), chunks


def _other_value(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """A value of the JSON that is another one; the length is right."""
    parts = re.split(rb"(:|,)", body)
    at = draw.randrange(len(parts))
    parts[at] = draw.choice(_VALUES)
    return _resized(head, b"".join(parts))


def _other_bytes(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Bytes anywhere that are changed, left out, doubled or added."""
    if body and draw.random() < 0.5:
        return _resized(head, _noise(draw, body))
    return _noise(draw, head), body


def _noise(draw: random.Random, data: bytes) -> bytes:
    at = draw.randint(0, len(data))
    to = min(len(data), at + draw.choice((1, 2, 8, 64)))
    new = draw.choice((b"", data[at:to] * 2, bytes(to - at), draw.randbytes(to - at), b"\r\n", b"\n", b"\x00"))
    return data[:at] + new + data[to:]


def _truncated(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    if body:
        return head, body[: draw.randrange(len(body))]
    return head[: draw.randint(0, len(head))], b""


def _resized(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    return re.sub(rb"content-length: \d+", b"content-length: %d" % len(body), head), body


_MUTATIONS: tuple[Mutation, ...] = (
    _other_line, _other_header, _other_header, _many_headers, _other_length, _chunked, _chunked, _other_value,
    _other_value, _other_bytes, _other_bytes, _truncated,
)  # fmt: skip

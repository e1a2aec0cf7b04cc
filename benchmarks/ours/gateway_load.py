"""Probes of a gateway with a great deal to do: connections, batches that wait, and large files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
from benchmarks.ours.service import DUMMY, Figures, Service, cpu_s_of, seconds_of, service

from embedctl.common import processes
from embedctl.queueing.broker import Broker
from embedctl_config import keys

_MIB, _GIB = 2**20, 2**30
#: Bytes of the text, a single word, of each request of a large file.
_TEXT_BYTES = 30_000
#: Calls of each kind, beside batches that wait.
_CALLS = 200
#: Callers who make batches.
_MAKERS = 4
_PATIENCE_S = 3600.0


class Gateway(NamedTuple):
    """A gateway in a process of its own."""

    url: str
    port: int
    pid: int

    def client(self, key: str = "") -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=600)

    def memory_mib(self, what: str = "VmHWM") -> float:
        """Its memory: the most since its start, or since :meth:`forget`; or that in use (VmRSS)."""
        found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found
        return int(found[1]) / 1024

    def forget(self) -> None:
        """Measure the most memory from now on."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


def gateway_connections(*, connections: int = 1000, each: int = 5) -> Figures:
    """Clients who embed single texts, each on a connection of its own, all at once."""
    with service(workers=1) as of, running_gateway(of) as gateway:
        asyncio.run(_ask(gateway.port, 10, 5))
        before = gateway.memory_mib("VmRSS")
        began = time.perf_counter()
        statuses, seconds = asyncio.run(_ask(gateway.port, connections, each))
        took = time.perf_counter() - began
        return {
            "requests": connections * each,
            "not answered with 200": connections * each - statuses.count(200),
            "requests/s": len(statuses) / took,
            "p50, s": float(np.percentile(seconds, 50)),
            "p99, s": float(np.percentile(seconds, 99)),
            "memory before, MiB": before,
            "memory at most, MiB": gateway.memory_mib(),
        }


def gateway_batches(*, batches: int = 10_000, seconds: float = 60.0) -> Figures:
    """Batches that wait for a model that nobody serves, and what else the gateway does meanwhile.

    The other calls are timed while no batch is there, while batches are made and read, and while all of them wait.
    """
    with service(workers=1) as of, running_gateway(of) as gateway, gateway.client() as client, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_MAKERS))
        redis = stack.enter_context(stack.enter_context(closing(Broker.connect(of.settings))).connection.client())
        found = _calls(client, "alone")
        line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "absent", "input": "a"}}
        form = {"file": json.dumps(line).encode()}
        file_id = client.post("/v1/files", data={"purpose": "batch"}, files=form).json()["id"]
        create = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        used = redis.info("memory")["used_memory"]

        def make(number: int) -> None:
            with gateway.client() as other:
                for at in range(number, batches, _MAKERS):
                    other.post("/v1/batches", json=create, headers={"idempotency-key": str(at)}).raise_for_status()

        began = time.perf_counter()
        making = [pool.submit(make, number) for number in range(_MAKERS)]
        found |= _calls(client, "while batches are made")
        for each in making:
            each.result()
        found["batches made/s"] = batches / (time.perf_counter() - began)
        while not _all_read(redis, batches):
            time.sleep(1)
        found["all read after, s"] = time.perf_counter() - began
        redis.config_resetstat()
        cpu_s, since = cpu_s_of(gateway.pid), time.perf_counter()
        time.sleep(seconds)
        passed = time.perf_counter() - since
        found["CPUs of the gateway while they wait"] = (cpu_s_of(gateway.pid) - cpu_s) / passed
        stats = redis.info("commandstats").values()
        found["commands of Redis/s while they wait"] = sum(each["calls"] for each in stats) / passed
        found |= _calls(client, "while they wait")
        found["a page of 100, ms"] = 1000 * seconds_of(lambda: client.get("/v1/batches", params={"limit": 100}))
        found["memory of Redis for each, bytes"] = (redis.info("memory")["used_memory"] - used) / batches
        found["memory at most, MiB"] = gateway.memory_mib()
        return found


def gateway_files(*, gib: float = 10.0) -> Figures:
    """A file of so many GiB: uploaded, used as a batch's requests, and downloaded; the bytes are in a folder."""
    with (
        tempfile.TemporaryDirectory(prefix="ec-files-") as place,
        service(chunk_files=place) as of,
        Service(of.settings.replace(chunk_files=place), of.folder).worker(),
        running_gateway(of) as gateway,
        gateway.client() as client,
    ):
        size = int(gib * _GIB)
        found: Figures = {"memory before, MiB": gateway.memory_mib("VmRSS")}
        file: dict[str, Any] = {}
        with _most(of, gateway, "upload", size, found):
            file = asyncio.run(_upload(gateway.url, size))
        with _most(of, gateway, "download", size, found):
            assert _download(client, file["id"]) == file["bytes"]
        create = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
        with _most(of, gateway, "batch", size, found):
            batch = client.post("/v1/batches", json=create).json()
            until = time.monotonic() + _PATIENCE_S
            while batch["status"] not in ("completed", "failed", "expired") and time.monotonic() < until:
                time.sleep(1)
                batch = client.get(f"/v1/batches/{batch['id']}").json()
        assert batch["status"] == "completed", batch
        found["requests of the batch"] = batch["request_counts"]["completed"]
        return found


@contextmanager
def _most(of: Service, gateway: Gateway, name: str, size: int, found: Figures) -> Iterator[None]:
    """Note the rate of a step, and the most memory of the gateway and of Redis meanwhile."""
    with closing(Broker.connect(of.settings)) as broker, broker.connection.client() as redis:
        redis.config_resetstat()
        gateway.forget()
        began = time.perf_counter()
        yield
        found[f"{name}, MiB/s"] = size / _MIB / (time.perf_counter() - began)
        found[f"{name}: memory at most, MiB"] = gateway.memory_mib()
        found[f"{name}: memory of Redis at most, MiB"] = redis.info("memory")["used_memory_peak"] / _MIB


@contextmanager
def running_gateway(of: Service, *options: str) -> Iterator[Gateway]:
    """A gateway until the block ends; nothing may be in its log but where it is."""
    log = of.folder / "gateway.log"
    environment = {
        **os.environ,
        "EMBEDCTL_REDIS_URL": of.settings.redis_url,
        "EMBEDCTL_HARDWARE": "auto",
        "TMPDIR": str(of.folder),
    }
    command = [sys.executable, "-m", "embedctl_gateway", "--address", "0", *options]
    with log.open("wb") as stream, processes.running(command, env=environment, stderr=stream) as process:
        until = time.monotonic() + 60
        while not (url := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())) and time.monotonic() < until:
            time.sleep(0.05)
        assert url, log.read_text()
        yield Gateway(url[0], int(url[1]), process.pid)
    assert "Traceback" not in log.read_text(), log.read_text()[-5000:]


class Bare:
    """A bare connection to a gateway, with a key."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str = "") -> None:
        self.reader = reader
        self.writer = writer
        self._key = key

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ask(self, method: str, path: str, sent: bytes = b"", *headers: str) -> int:
        """A request, and its answer read to the end: the status."""
        await self.send(self.request(method, path, sent, *headers))
        return await self.answer()

    def request(self, method: str, path: str, sent: bytes = b"", *headers: str) -> bytes:
        key = [f"authorization: Bearer {self._key}"] if self._key else []
        head = [f"{method} {path} HTTP/1.1", "host: localhost", *key, *headers]
        if sent and not any(each.startswith("content-length") for each in headers):
            head.append(f"content-length: {len(sent)}")
        return "\r\n".join([*head, "", ""]).encode() + sent

    async def answer(self) -> int:
        head = await self.reader.readuntil(b"\r\n\r\n")
        if found := re.search(rb"content-length: (\d+)", head):
            await self.reader.readexactly(int(found[1]))
        else:
            while size := int(await self.reader.readline() or b"0", 16):
                await self.reader.readexactly(size + 2)
            await self.reader.readline()
        return int(head[9:12])


async def _ask(port: int, connections: int, each: int) -> tuple[list[int], list[float]]:
    """The status of each request, and how long it took (seconds). 0: the connection broke."""
    body = json.dumps({"model": DUMMY, "input": "a text", "encoding_format": "base64"}).encode()
    statuses: list[int] = []
    seconds: list[float] = []

    async def one() -> None:
        try:
            own = Bare(*await asyncio.open_connection("127.0.0.1", port))
            for _ in range(each):
                began = time.perf_counter()
                statuses.append(await own.ask("POST", "/v1/embeddings", body))
                seconds.append(time.perf_counter() - began)
            own.writer.close()
        except (OSError, asyncio.IncompleteReadError):
            statuses.append(0)

    await asyncio.gather(*(one() for _ in range(connections)))
    return statuses, seconds


def _calls(client: httpx2.Client, when: str) -> Figures:
    """How long a look at the gateway's health and a single text take, p50 and p99."""
    found: Figures = {}
    body = {"model": DUMMY, "input": "a text"}
    for name, call in (
        ("/health", lambda: client.get("/health").raise_for_status()),
        ("a text", lambda: client.post("/v1/embeddings", json=body).raise_for_status()),
    ):
        took = [1000 * seconds_of(call) for _ in range(_CALLS)]
        for part in (50, 99):
            found[f"{name} {when}, p{part}, ms"] = float(np.percentile(took, part))
    return found


def _all_read(redis: Any, batches: int) -> bool:
    """Whether the gateway has read the requests of so many batches."""
    pipe = redis.pipeline(transaction=False)
    for each in redis.zrange(keys.unfinished("default"), 0, -1):
        pipe.hexists(keys.batch(each.decode()), "total")
    return bool(sum(pipe.execute()) == batches)


async def _upload(url: str, size: int) -> dict[str, Any]:
    """Upload a file of requests, without having it in memory or on the disk."""
    head = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    body = json.dumps({"model": DUMMY, "input": "w" * _TEXT_BYTES}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield head
        sent, number = 0, 0
        while sent < size:
            piece = b"".join(
                b'{"custom_id":"%d","method":"POST","url":"/v1/embeddings","body":%b}\n' % (number + at, body)
                for at in range(32)
            )
            number += 32
            sent += len(piece)
            yield piece
        yield b"\r\n--b--\r\n"

    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await client.post("/v1/files", content=pieces(), headers=kind)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def _download(client: httpx2.Client, file_id: str) -> int:
    """The bytes of a file's content."""
    with client.stream("GET", f"/v1/files/{file_id}/content") as answer:
        return sum(len(piece) for piece in answer.iter_bytes(_MIB))

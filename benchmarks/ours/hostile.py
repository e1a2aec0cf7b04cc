"""A client's single texts alone, and beside clients of another tenant, and of none, who attack the gateway."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.synchronize import Event

import httpx2
from benchmarks.ours.gateway_load import Bare, running_gateway
from benchmarks.ours.service import Figures, Service, cpu_s_of, service

from embedctl_gateway.access.key_file import add_key
from embedctl_gateway.batches.apart import give_way

#: Between two texts of the client (seconds).
_PAUSE_S = 0.02
#: Between two connections of an attacker that was refused (seconds), and of one that sends slowly between two bytes.
_AGAIN_S, _SLOWLY_S = 0.05, 1.0
_MIB = 1024 * 1024
#: What attackers send again and again. It is made once, because it is the gateway's time that is measured.
BODIES: Mapping[str, Callable[[], bytes]] = {
    "texts": lambda: json.dumps({"model": "dummy", "input": ["word"] * 2048}).encode(),
    "large": lambda: b'{"model":"dummy","input":[' + b'"a",' * (4 * _MIB - 10) + b'"a"]}',
    "deep": lambda: b'{"input":' + b"[" * (16 * _MIB - 100),
    "fields": lambda: b"{%b}" % b",".join(b'"%d":%d' % (number, number) for number in range(30_000)),
    "nested": lambda: b'{"input":[' + b"[1]," * 16_000 + b"[1]]}",
    "bomb": lambda: gzip.compress(bytes(16 * _MIB)),
}


@cache
def body(name: str) -> bytes:
    return BODIES[name]()


@dataclass(frozen=True)
class Target:
    """What an attacker knows: where the gateway is, a key of its own tenant, and a file of its own."""

    port: int
    key: str
    file_id: str


class Attacker(Bare):
    """A connection that is made again whenever it ends."""

    def __init__(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer, target.key)
        self.target = target

    async def ask_at_once(self, requests: Iterable[bytes]) -> None:
        """Requests that do not wait for one another's answers."""
        sent = [*requests]
        await self.send(b"".join(sent))
        for _ in sent:
            await self.answer()

    async def trickle(self, first: bytes) -> None:
        await self.send(first)
        while not self.reader.at_eof():
            await asyncio.sleep(_SLOWLY_S)
            await self.send(b"x")


Attack = Callable[[Attacker], Awaitable[object]]


async def never_read(one: Attacker) -> None:
    await one.send(one.request("POST", "/v1/embeddings", body("texts")))
    await asyncio.sleep(5)
    await one.send(one.request("GET", f"/v1/files/{one.target.file_id}/content"))
    await asyncio.sleep(30)


async def endless_forms(one: Attacker) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
    await one.send(one.request("POST", "/v1/files", b"", _FORM, "transfer-encoding: chunked"))
    await one.send(b"%x\r\n%b\r\n" % (len(form), form))
    while not one.reader.at_eof():
        await one.send(b"10000\r\n" + bytes(65536) + b"\r\n")
        await asyncio.sleep(0.01)


async def many_connections(one: Attacker) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", one.target.port) for _ in range(100)]
    await asyncio.sleep(2)
    for _, writer in opened:
        writer.close()


async def single_bytes(one: Attacker) -> None:
    path = f"/v1/files/{one.target.file_id}/content"
    await one.ask_at_once(one.request("GET", path, b"", f"range: bytes={at}-{at}") for at in range(50))


async def batches(one: Attacker) -> None:
    fields = {"input_file_id": one.target.file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    await one.ask("POST", "/v1/batches", json.dumps(fields).encode())
    await asyncio.sleep(5)


def _embeds(name: str, *headers: str) -> Attack:
    """Sends a body again and again."""
    return lambda one: one.ask("POST", "/v1/embeddings", body(name), *headers)


_FORM = "content-type: multipart/form-data; boundary=b"
ATTACKS: Mapping[str, Attack] = {
    "slow_headers": lambda one: one.trickle(b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\nx: "),
    "slow_bodies": lambda one: one.trickle(one.request("POST", "/v1/embeddings", b"{", "content-length: 60000")),
    "large_json": _embeds("large"),
    "deep_json": _embeds("deep"),
    "many_fields": _embeds("fields"),
    "nested_small_json": _embeds("nested"),
    "never_read": never_read,
    "slow_uploads": lambda one: one.trickle(
        one.request("POST", "/v1/files", b"--b\r\n", _FORM, "content-length: 100000")
    ),
    "endless_forms": endless_forms,
    "many_connections": many_connections,
    "huge_headers": lambda one: one.ask("GET", "/v1/models", b"", *["a:b"] * 6000),
    "bombs": _embeds("bomb", "content-encoding: gzip"),
    "single_bytes": single_bytes,
    "pipelined": lambda one: one.ask_at_once([one.request("GET", "/v1/models")] * 400),
    "strangers": lambda one: one.ask_at_once([b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"] * 50),
    "listings": lambda one: one.ask("GET", "/v1/files?limit=10000"),
    "floods": lambda one: one.ask(
        "POST", "/v1/embeddings", json.dumps({"model": "dummy", "input": str(random.random())}).encode()
    ),
    "batches": batches,
}


def hostile(clients: int = 50, seconds: int = 8, turns: int = 3, attack: str = "", files: int = 2000) -> Figures:
    """The times of single texts of one tenant, alone and beside hostile clients, by turns of so many seconds."""
    with service(workers=1, dim=384) as made, attacked(made, clients, attack, files) as (ask, attacking, pids):
        for _ in range(50):
            ask()
        found: dict[str, list[float]] = {"alone": [], "beside": []}
        refused, cpu_s = 0, dict.fromkeys(pids, 0.0)
        for _ in range(turns):
            for name, times in found.items():
                (attacking.set if name == "beside" else attacking.clear)()
                time.sleep(2)
                before = {who: cpu_s_of(pid) for who, pid in pids.items()}
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    if seconds_taken := ask():
                        times.append(seconds_taken)
                    else:
                        refused += 1
                    time.sleep(_PAUSE_S)
                for who, pid in pids.items() if name == "beside" else ():
                    cpu_s[who] += cpu_s_of(pid) - before[who]
    figures = {"texts": float(len(found["beside"])), "refused": float(refused)}
    figures |= {f"{who}_cpus": taken / (turns * seconds) for who, taken in cpu_s.items()}
    for name, times in found.items():
        figures[f"{name}_p50_ms"], figures[f"{name}_p99_ms"] = (
            1000 * statistics.quantiles(times, n=100, method="inclusive")[at] for at in (49, 98)
        )
    return {**figures, "p99_ratio": figures["beside_p99_ms"] / figures["alone_p99_ms"]}


def hostile_kinds(clients: int = 50, seconds: int = 5, turns: int = 2) -> Figures:
    """The times of single texts of one tenant, alone and beside hostile clients of one kind, for each kind in turn."""
    found: Figures = {}
    for kind in ATTACKS:
        figures = hostile(clients, seconds, turns, kind, 2000 if kind == "listings" else 20)
        found |= {f"{kind}: {name}": figures[name] for name in ("alone_p99_ms", "beside_p99_ms", "p99_ratio")}
        found |= {f"{kind}: {name}": figures[name] for name in ("gateway_cpus", "attackers_cpus")}
    return found


@contextmanager
def attacked(
    made: Service, clients: int, attack: str, files: int
) -> Iterator[tuple[Callable[[], float], Event, dict[str, int]]]:
    """What asks the gateway for a text's vector, and tells how long that took (seconds; 0 if it was refused); whether
    the gateway is attacked; and the processes of both."""
    path = made.folder / "keys"
    mine, theirs = add_key(path, "bob", "bob"), add_key(path, "eve", "eve")
    with running_gateway(made, "--keys", str(path)) as gateway:
        with gateway.client(theirs) as client:
            target = Target(gateway.port, theirs, _own_file(client, files))
        context = multiprocessing.get_context("spawn")
        attacking = context.Event()
        process = context.Process(target=_attack, args=(target, clients, attack, attacking), daemon=True)
        process.start()
        own = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        headers = {"authorization": f"Bearer {mine}", "content-type": "application/json"}

        def ask() -> float:
            asked = json.dumps({"model": "dummy", "input": f"a text {random.random()}"})
            began = time.perf_counter()
            try:
                own.request("POST", "/v1/embeddings", asked, headers)
                answer = own.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                own.close()
                return 0.0
            return time.perf_counter() - began if answer.status == 200 else 0.0

        try:
            yield ask, attacking, {"gateway": gateway.pid, "attackers": process.pid or 0}
        finally:
            process.kill()
            process.join()


def _own_file(client: httpx2.Client, files: int) -> str:
    """Upload files, the last one of 8 MiB of requests; gives its id."""
    line = json.dumps(
        {"custom_id": "%d", "method": "POST", "url": "/v1/embeddings", "body": {"model": "dummy", "input": "a"}}
    )
    # It is read to its end, and refused: workers, whose time is not the gateway's, get nothing of it.
    large = "".join(f"{line}\n" % number for number in range(8 * _MIB // len(line))).encode() + b"{"
    for data in [b"x"] * files + [large]:
        answer = client.post("/v1/files", data={"purpose": "batch"}, files={"file": data})
    return str(answer.json()["id"])


def _attack(target: Target, clients: int, attack: str, attacking: Event) -> None:
    """In a process of its own, which gives way to all others: attackers have their own machines."""
    give_way(19)
    chosen = [ATTACKS[attack]] if attack else [*ATTACKS.values()]

    async def attackers() -> None:
        await asyncio.gather(*(_again(chosen[number % len(chosen)], target, attacking) for number in range(clients)))

    asyncio.run(attackers())


async def _again(attack: Attack, target: Target, attacking: Event) -> None:
    while True:
        while not attacking.is_set():
            await asyncio.sleep(0.1)
        with suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            try:
                one, task = Attacker(target, reader, writer), None
                while attacking.is_set():
                    task = asyncio.ensure_future(attack(one))
                    while not task.done() and attacking.is_set():
                        await asyncio.wait({task}, timeout=0.5)
                    if not task.done():
                        task.cancel()
                        break
                    task.result()
            finally:
                writer.transport.abort()
        await asyncio.sleep(_AGAIN_S)

"""Commands and the library through a gateway, for those who have no Redis."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest

from embedctl import (
    Job,
    JobDrained,
    JobNotFound,
    NotPermitted,
    QuotaExceeded,
    WaitTimeout,
    aenqueue_embeddings,
    enqueue_embeddings,
)
from embedctl.jobs.offered import MAX_VECTOR_BYTES
from embedctl.remote.calls import Calls
from embedctl.remote.jobs import RemoteDrains
from embedctl.store.connection import Connection
from embedctl_config import keys
from embedctl_config.errors import GatewayUnavailable
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput, RecordKind, encode_input
from embedctl_gateway.access.key_file import add_key
from embedctl_gateway.calls.steps import STEPS
from tests.support.changes import SHORT_LEASE
from tests.support.drained_parts import manifest_of, results_in_redis, rows_of
from tests.support.failpoints import killed_at
from tests.support.forked import Forked
from tests.support.gateway import Running, error_of, running_gateway
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.limits import limited
from tests.support.processes import RunEmbedctl, free_ports
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

TEXTS = [f"text {number}" for number in range(700)]


class Outside(NamedTuple):
    """A gateway with keys, and what a caller without Redis has."""

    gateway: Running
    keys: Path
    settings: Settings
    #: The variables of the caller's processes, and what runs commands with them.
    variables: dict[str, str]
    embedctl: RunEmbedctl


@pytest.fixture
def outside(here: Here, tmp_path: Path) -> Iterator[Outside]:
    keys, key_file = tmp_path / "gateway.keys", tmp_path / "key"
    key_file.write_text(add_key(keys, "alice", "search") + "\n")
    # Of one class, because some jobs are made before there is a worker.
    with running_gateway(here.settings.replace(gateway_keys_file=str(keys)), hardware="dummy") as gateway:
        settings = here.settings.replace(redis_url="", url=gateway.url, api_key_file=str(key_file), chunk_files="")
        nowhere = dict.fromkeys(("EMBEDCTL_REDIS_URL", "EMBEDCTL_CHUNK_FILES"), "")
        variables = {**nowhere, "EMBEDCTL_URL": gateway.url, "EMBEDCTL_API_KEY_FILE": str(key_file)}
        yield Outside(gateway, keys, settings, variables, partial(here.embedctl, **variables))


def test_the_library_gets_the_same_vectors_through_a_gateway(here: Here, outside: Outside) -> None:
    others = enqueue_embeddings(TEXTS, vectors="sparse,multi", chunk_size=300, settings=outside.settings)
    bound = MAX_VECTOR_BYTES // (4 * 1024)  # as many tokens, as wide as where no worker tells it
    assert others.status().options["chunk_bytes"] == bound < here.settings.chunk_bytes
    here.start_worker()
    job = enqueue_embeddings(TEXTS, ids=range(len(TEXTS)), chunk_size=64, settings=outside.settings)
    assert here.broker.jobs.status(job.id).tenant == "search"
    seen = list(job.iter_results(timeout=60))
    assert job.wait(timeout=60).done == len(TEXTS)
    assert [label for chunk in seen for label in chunk.ids] == list(range(len(TEXTS)))
    np.testing.assert_allclose(job.vectors(), reference(TEXTS), atol=1e-6)
    assert Job.get(job.id, outside.settings).errors() == []
    job.discard()
    others.wait(timeout=60)
    in_redis = Job.get(others.id, here.settings)
    for through, direct in zip(others.sparse(), in_redis.sparse(), strict=True):
        np.testing.assert_array_equal(through.indices, direct.indices)
        np.testing.assert_array_equal(through.weights, direct.weights)
    assert [each.position for each in others.multi()] == list(range(len(TEXTS)))
    np.testing.assert_allclose(next(others.multi()).vectors, reference(TEXTS[0].split()), atol=1e-6)
    others.discard()
    assert not list(here.broker.jobs.newest())


def test_the_commands_write_the_same_bytes_through_a_gateway(here: Here, outside: Outside) -> None:
    here.start_worker()
    (here.folder / "corpus.txt").write_text("\n".join(TEXTS))
    for name, embedctl in (("redis", here.embedctl), ("gateway", outside.embedctl)):
        job_id = embedctl("submit", "corpus.txt", "--chunk-size", "64", status=0).stdout.strip()
        embedctl("fetch", job_id, "-o", f"{name}.npy", "--quiet", status=0)
        shown = embedctl("status", job_id, "--json")
        assert json.loads(shown.stdout)["done"] == len(TEXTS), shown.stderr
        for command in ("wait", "errors", "cancel", "discard"):
            embedctl(command, job_id, status=0)
    assert (here.folder / "redis.npy").read_bytes() == (here.folder / "gateway.npy").read_bytes()
    assert not list(here.broker.jobs.newest())


def test_a_file_is_brought_up_to_date_through_a_gateway(here: Here, outside: Outside) -> None:
    here.start_worker()
    for texts in (TEXTS[:20], TEXTS[5:25]):
        lines = (json.dumps({"id": text, "text": text}) for text in texts)
        (here.folder / "corpus.jsonl").write_text("\n".join(lines))
        done = outside.embedctl("submit", "corpus.jsonl", "-o", "out.npy", "--sync", status=0)
    assert re.search(r"\b15 .*unchanged|\b5 .*(new|encoded)", done.stderr), done.stderr
    np.testing.assert_allclose(np.load(here.folder / "out.npy"), reference(TEXTS[5:25]), atol=1e-6)


def test_run_leaves_the_work_to_the_gateways_workers(here: Here, outside: Outside) -> None:
    here.start_worker()
    (here.folder / "corpus.txt").write_text("\n".join(TEXTS))
    outside.embedctl("run", "corpus.txt", "-o", "run.npy", "--quiet", status=0)
    refused = outside.embedctl("run", "corpus.txt", "-o", "run.npy", "--cpus", "0", status=2)
    outside.embedctl("run", "corpus.txt", "-o", "parts/", "--quiet", status=0)
    np.testing.assert_allclose(np.load(here.folder / "run.npy"), reference(TEXTS), atol=1e-6)
    assert not list(here.broker.jobs.newest())
    assert "EMBEDCTL_URL names a gateway: omit them" in refused.stderr
    np.testing.assert_allclose(vectors_in(here.folder / "parts"), reference(TEXTS), atol=1e-6)


@pytest.mark.parametrize(("step", "after"), [("note", False), ("note", True), ("unlink", True)])
def test_a_killed_drain_resumes_and_no_vector_is_lost_or_doubled(
    here: Here, outside: Outside, step: str, after: bool
) -> None:
    here.start_worker()
    settings = limited(outside.settings, part_records=60)
    job = enqueue_embeddings(TEXTS, chunk_size=25, settings=settings)
    with killed_at(RemoteDrains, step, 2, after=after):
        job.deliver(here.folder / "parts")
    assert here.broker.drains.state(job.id).parts == 1 + after
    outside.embedctl("fetch", job.id[-6:], "-o", "parts/", "--quiet", status=0)
    shown = json.loads(outside.embedctl("status", job.id[-6:], "--json").stdout)
    np.testing.assert_allclose(vectors_in(here.folder / "parts"), reference(TEXTS), atol=1e-6)
    assert (shown["done"], shown["id"]) == (len(TEXTS), job.id)
    np.testing.assert_allclose(job.vectors(), reference(TEXTS), atol=1e-6)  # of the parts
    assert results_in_redis(Job.get(job.id, here.settings)) == set()
    with pytest.raises(JobDrained, match="by a caller of a gateway"):  # what a caller names is opened by nobody else
        Job.get(job.id, here.settings).vectors()


def test_a_submission_drains_into_a_folder(here: Here, outside: Outside) -> None:
    here.start_worker()
    (here.folder / "corpus.txt").write_text("\n".join(TEXTS))
    begun = outside.embedctl("submit", "corpus.txt", "--drain", "--quiet", status=0)
    assert here.broker.jobs.status(begun.stdout.strip()).results_high_water
    outside.embedctl("fetch", begun.stdout.strip(), "-o", "parts/", "--quiet", status=0)
    np.testing.assert_allclose(vectors_in(here.folder / "parts"), reference(TEXTS), atol=1e-6)
    known = len(list(here.broker.jobs.newest()))
    refused = outside.embedctl("submit", "corpus.txt", "-o", "parts/", "--resume", "another", status=2)
    assert f"of job {begun.stdout.strip()}: choose another folder" in refused.stderr
    for _ in range(2):
        outside.embedctl("submit", "corpus.txt", "-o", "more/", "--resume", "k", status=0)
    assert len(list(here.broker.jobs.newest())) == known + 1


def vectors_in(folder: Path) -> Any:
    """The vectors of all parts, in order; each record is there once."""
    rows = rows_of(folder)
    assert manifest_of(folder)["records"] == len(rows)
    return np.array([rows[position]["embedding"] for position in range(len(rows))])


PART = {"sha256": "aa", "bytes": 1, "first": 0, "last": 0, "records": 1}
WRONG_STEPS: list[tuple[str, dict[str, Any]]] = [
    ("note_drained", {"facts": {**PART, "last": 10**9}}),
    ("note_drained", {"digests": "00" * 32}),
    ("note_drained", {"facts": {**PART, "last": -1}}),
    ("note_drained", {"more": [5], "facts": {**PART, "last": -1}}),
    ("note_drained", {"more": [5]}),
    ("note_drained", {"name": "../x"}),
    ("note_drained", {"facts": {**PART, "last": "0"}}),
    ("note_drained", {"facts": {"nothing": 1}}),
    ("free_drained", {"numbers": [-1]}),
    ("free_drained", {"numbers": [0] * 20_001}),
    ("drained_facts", {"names": ["x"]}),
    ("drain", {"host": "a host"}),
    ("drain", {"place": "a\nb"}),
]


def test_a_drain_that_the_library_would_not_make_is_refused(here: Here, outside: Outside) -> None:
    job = enqueue_embeddings(TEXTS[:2], settings=outside.settings)
    right: dict[str, dict[str, Any]] = {
        "drain": {**dict.fromkeys(("token", "dead"), "ab"), "machine": "m", "process": "p", "host": "h"},
        "note_drained": {
            "token": "ab",
            "name": "part-000000.parquet",
            "result_bytes": 1,
            "digests": "00" * 16,
            "more": [],
            "facts": PART,
        },
        "free_drained": {},
        "drained_facts": {},
    }
    right["drain"] |= {"high_water": 1, "place": "/parts"}
    with outside.gateway.client(Path(outside.settings.api_key_file).read_text().strip()) as client:
        path = f"/v1/jobs/{job.id}/steps"
        assert client.post(f"{path}/drain", json=right["drain"]).json()["answer"]["state"] == [0, 0, 0, "/parts"]
        missing = client.post(f"{path}/note_drained", json=right["note_drained"])
        assert missing.json()["answer"] == "missing"  # it is not done
        for step, wrong in WRONG_STEPS:
            refused = client.post(f"{path}/{step}", json={**right[step], **wrong})
            assert refused.status_code == 400, (step, wrong, refused.text)
    assert here.broker.drains.state(job.id).parts == 0


def test_the_list_shows_the_tenants_jobs_alone_in_slices(
    here: Here, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl.store.reading._LOOKED_AT", 3)
    mine = [enqueue_embeddings(TEXTS[:1], settings=outside.settings).id for _ in range(3)]
    others = [enqueue_embeddings(TEXTS[:1], settings=here.settings).id for _ in range(7)]
    mine.append(enqueue_embeddings(TEXTS[:1], settings=outside.settings).id)
    listed = json.loads(outside.embedctl("list", "--json").stdout)
    assert [job["id"] for job in listed] == mine[::-1]
    short = outside.embedctl("list", "--limit", "1")
    assert short.stdout.count(mine[-1]) == 1
    assert "… and more; --limit 2 shows more" in short.stderr
    outside.embedctl("status", mine[0][-6:], "--json", status=0)
    for unknown in (others[0][-6:], "abcdef"):
        outside.embedctl("status", unknown, status=4)
    assert "several jobs" in outside.embedctl("status", mine[0][:8]).stderr
    outside.embedctl("discard", *(each[-8:] for each in mine), status=0)
    assert sorted(job.id for job in here.broker.jobs.newest()) == sorted(others)


@pytest.mark.parametrize("damage", ["a field is lost", "the key is of another type"])
def test_a_damaged_job_is_discarded_by_its_tenant(here: Here, outside: Outside, damage: str, tmp_path: Path) -> None:
    job = enqueue_embeddings(TEXTS[:3], settings=outside.settings)
    if damage == "a field is lost":
        here.raw.hdel(keys.job(job.id), "created_ms")
        other = enqueue_embeddings(TEXTS[:3], settings=here.settings)
        here.raw.hdel(keys.job(other.id), "created_ms")
        with pytest.raises(JobNotFound):
            Job.get(other.id, outside.settings)
        with pytest.raises(JobNotFound):
            Job(other.id, job._broker).discard()
        assert here.raw.exists(keys.job(other.id))
    else:
        here.raw.unlink(keys.job(job.id))
        here.raw.set(keys.job(job.id), "x", px=100_000)
    assert "is damaged" in outside.embedctl("status", job.id).stderr
    outside.embedctl("discard", job.id, status=0)
    outside.embedctl("status", job.id, status=4)
    assert not [name for name in here.raw.keys("embed:*") if job.id.encode() in name]


def test_a_command_that_needs_redis_names_the_setting(outside: Outside) -> None:
    for command in ("status", "metrics", "worker --model dummy --class dummy", "flower", "gateway"):
        refused = outside.embedctl(*command.split(), status=2)
        said = refused.stderr + refused.stdout
        assert "needs Redis, and EMBEDCTL_URL names a gateway: set EMBEDCTL_REDIS_URL" in said, command
        assert "Traceback" not in said


def test_doctor_looks_at_the_gateway(here: Here, outside: Outside, tmp_path: Path) -> None:
    (wrong := tmp_path / "wrong").write_text("embedctl-wrong")
    assert "answers, and no live worker serves a model" in outside.embedctl("doctor").stdout
    here.start_worker()
    assert f"{outside.gateway.url} answers, and serves dummy" in outside.embedctl("doctor").stdout
    assert "the API key is wrong" in outside.embedctl("doctor", EMBEDCTL_API_KEY_FILE=str(wrong), status=1).stdout


def test_a_job_is_there_for_its_tenant_alone(here: Here, outside: Outside, tmp_path: Path) -> None:
    here.start_worker()
    job = enqueue_embeddings(TEXTS[:3], settings=outside.settings)
    other = tmp_path / "other"
    other.write_text(key := add_key(outside.keys, "bob", "team-b"))
    eventually(lambda: _status(outside, key, "GET", "/v1/models") == 200, what="the new key")
    with pytest.raises(JobNotFound) as found:
        Job.get(job.id, outside.settings.replace(api_key_file=str(other)))
    never = f"{job.id[:-4]}ffff"
    with pytest.raises(JobNotFound) as absent:
        Job.get(never, outside.settings)
    assert str(found.value).replace(job.id, never) == str(absent.value)
    calls = [
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/events"),
        ("PUT", "/chunks/0?token=ab"),
        *(("GET", f"/chunks/0/{what}") for what in ("input", "result")),
        *(("POST", f"/steps/{step}") for step in STEPS),
    ]
    assert {_status(outside, key, method, f"/v1/jobs/{job.id}{path}") for method, path in calls} == {404}
    with pytest.raises(NotPermitted, match="this key is for tenant search"):
        enqueue_embeddings(TEXTS[:3], tenant="team-b", settings=outside.settings)
    assert job.wait(timeout=60).done == 3


def _status(outside: Outside, key: str, method: str, path: str) -> int:
    with outside.gateway.client(key) as client:
        return client.request(method, path, json={} if method == "POST" else None).status_code


def test_a_wrong_key_is_told_and_not_shown(here: Here, outside: Outside, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("embedctl-wrong\n")
    (here.folder / "corpus.txt").write_text("a text\n")
    for command in (["submit", "corpus.txt"], ["status", "20261127-000000-0123456789"]):
        refused = outside.embedctl(*command, EMBEDCTL_API_KEY_FILE=str(wrong), status=77)
        assert "refuses: the API key is wrong" in refused.stderr
        assert "EMBEDCTL_API_KEY_FILE" in refused.stderr
        assert "embedctl-wrong" not in refused.stderr
    away = outside.embedctl("submit", "corpus.txt", EMBEDCTL_URL="http://127.0.0.1:1", status=69)
    assert "the gateway at http://127.0.0.1:1 can't be reached" in away.stderr


def test_lost_answers_make_nothing_twice(here: Here, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is made, and its first answer is lost."""
    here.start_worker()
    exchanged, lost = Calls._exchanged, set[tuple[str, str]]()

    def losing(self: Calls, method: str, target: str, *more: Any) -> Any:
        answer = exchanged(self, method, target, *more)
        if "dry_run" not in str(more) and method != "GET" and (method, target) not in lost:
            lost.add((method, target))
            raise ConnectionResetError("lost")
        return answer

    monkeypatch.setattr(Calls, "_exchanged", losing)
    job = enqueue_embeddings(TEXTS, chunk_size=64, settings=outside.settings)
    assert job.wait(timeout=60).done == len(TEXTS)
    np.testing.assert_allclose(job.vectors(), reference(TEXTS), atol=1e-6)
    (only,) = here.broker.jobs.newest()
    assert (only.id, only.records, only.chunks) == (job.id, len(TEXTS), 11)
    assert {target.split("/")[-1].split("?")[0] for _, target in lost} >= {"jobs", "0", "10", "seal"}


@pytest.mark.parametrize("sent", [b"", b"half"])
def test_half_an_answer_is_none(settings: Settings, sent: bytes) -> None:
    """A gateway that is killed while it answers ends the connection in the middle."""

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n" + sent)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer).start()
        calls = Calls(settings.replace(redis_url="", url=f"http://127.0.0.1:{server.getsockname()[1]}"))
        with pytest.raises(GatewayUnavailable, match=f"{len(sent)} bytes read"):
            calls.ask("GET", "jobs/a/chunks/0/result")


def test_a_killed_submission_and_a_killed_fetch_resume(
    here: Here, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "PRODUCER_LEASE_S", 1)  # for the gateway
    (here.folder / "corpus.txt").write_text("\n".join(TEXTS))
    submit = ["submit", "--format", "txt", "--class", "slow", "--chunk-size", "25", "--resume", "mine"]
    fetch = ["fetch", "-o", "vectors.npy", "--quiet"]
    variables = {**here.environment, **outside.variables}
    with Forked([*submit, "-"], variables, here.folder, DEVNULL, DEVNULL, stdin=PIPE, prepare=SHORT_LEASE) as process:
        assert process.stdin is not None
        process.stdin.write("\n".join(TEXTS[:90]))
        process.stdin.flush()
        eventually(lambda: [job.chunks for job in here.broker.jobs.newest()] == [3], what="the first chunks")
        process.kill()
    (begun,) = here.broker.jobs.newest()
    here.start_worker(hardware="slow")
    again = outside.embedctl(*submit, "corpus.txt", prepare=SHORT_LEASE)
    assert (again.returncode, again.stdout.strip()) == (0, begun.id), again.stderr
    with Forked([*fetch, begun.id], variables, here.folder, DEVNULL, DEVNULL) as process:
        eventually(lambda: here.broker.jobs.status(begun.id).chunks_done >= 6, what="some results")
        process.kill()
    outside.embedctl(*fetch, begun.id, status=0)
    np.testing.assert_allclose(np.load(here.folder / "vectors.npy"), reference(TEXTS), atol=1e-6)


@pytest.fixture
def proxy(outside: Outside) -> Iterator[Proxy]:
    proxy = Proxy(outside.gateway.port)
    proxy.start()
    yield proxy
    proxy.stop()


def test_a_caller_waits_for_a_gateway_that_is_away(here: Here, outside: Outside, proxy: Proxy) -> None:
    settings = outside.settings.replace(url=f"http://127.0.0.1:{proxy.port}/v1")

    def texts() -> Iterator[str]:
        for number, text in enumerate(TEXTS):
            if number == 300:
                proxy.lead_to(free_ports(1)[0])
                proxy.cut()
                threading.Timer(1.0, proxy.lead_to, [outside.gateway.port]).start()
            yield text

    job = enqueue_embeddings(texts(), chunk_size=8, settings=settings)
    threading.Timer(1.0, proxy.cut).start()
    threading.Timer(1.5, here.start_worker).start()
    assert job.wait(timeout=60).done == len(TEXTS)
    np.testing.assert_allclose(job.vectors(), reference(TEXTS), atol=1e-6)
    (only,) = here.broker.jobs.newest()
    assert only.records == len(TEXTS)


def test_a_tenants_limits_hold_through_a_gateway(here: Here, outside: Outside) -> None:
    config = Path(here.environment["EMBEDCTL_CONFIG"])
    config.write_text(f"{config.read_text()}\n[tenants.search]\nmax_jobs = 1\nmax_waiting_records = 100\n")
    worker = here.start_worker()
    eventually(lambda: [quota.tenant for quota in here.broker.quotas.all(10)] == ["search"])
    worker.kill()
    job = enqueue_embeddings(TEXTS[:3], settings=outside.settings)
    with pytest.raises(QuotaExceeded) as raised:
        enqueue_embeddings(TEXTS[:3], settings=outside.settings)
    told = raised.value
    assert (told.tenant, told.limit, told.most, told.used) == ("search", "max_jobs", 1, 1)
    job.cancel()
    with pytest.raises(WaitTimeout, match="waits for room within max_waiting_records of tenant search"):
        enqueue_embeddings(TEXTS, chunk_size=64, timeout=1.0, settings=outside.settings)
    assert not [each for each in here.broker.jobs.newest() if not each.state.ended]


def test_a_tenant_without_limits_fills_no_redis_and_others_go_on(
    here: Here, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "maxmemory", lambda _: 4 * 1024 * 1024)
    alice, bob = (Path(outside.settings.api_key_file).read_text().strip(), add_key(outside.keys, "bob", "other"))
    with outside.gateway.client(alice) as client, outside.gateway.client(bob) as other:
        eventually(lambda: other.get("/v1/models").status_code == 200, what="the key's turn")

        def put(by: httpx2.Client, job: str, number: int) -> httpx2.Response:
            chunk = encode_input(ChunkInput(8 * number, bytes(8), [b"a" * 8192] * 8))
            return by.put(f"/v1/jobs/{job}/chunks/{number}?token=ab", content=chunk)

        jobs = [
            by.post("/v1/jobs", json={"model": "dummy", "chunk_size": 8}).json()["id"] for by in (client, client, other)
        ]
        number = next(each for each in range(40) if put(client, jobs[0], each).status_code != 200)
        full = put(client, jobs[0], number)
        assert (full.status_code, error_of(full)["code"]) == (429, "quota_exceeded")
        assert "fetch and discard jobs" in error_of(full)["message"]
        assert put(client, jobs[1], 0).status_code == 200  # a tenth is for what begins

        def upload(by: httpx2.Client) -> int:
            file = {"file": ("x.jsonl", b"{}" * 300_000)}
            return by.post("/v1/files", files=file, data={"purpose": "batch"}).status_code

        assert upload(client) == 429
        assert put(other, jobs[2], 0).status_code == 200
        assert upload(other) == 200
        assert client.delete(f"/v1/jobs/{jobs[0]}").status_code == 200
        assert put(client, jobs[1], 1).status_code == 200
        assert upload(client) == 200


def test_tasks_wait_for_jobs_through_a_gateway(here: Here, outside: Outside) -> None:
    here.start_worker()

    async def embed(number: int) -> Any:
        job = await aenqueue_embeddings([f"text {number}"], settings=outside.settings)
        await job.wait(timeout=60)
        vectors = await job.vectors()
        await job.discard()
        return vectors[0]

    async def embed_all() -> list[Any]:
        return await asyncio.gather(*map(embed, range(8)))

    np.testing.assert_allclose(asyncio.run(embed_all()), reference(TEXTS[:8]), atol=1e-6)
    assert not list(here.broker.jobs.newest())


BAD = {
    "text that is not UTF-8": ChunkInput(0, bytes([RecordKind.TEXT]), [b"\xff"]),
    "size that is none": ChunkInput(0, bytes([RecordKind.OVERSIZE]), [b"many"]),
    "position of another record": ChunkInput(2**64 - 1, bytes([RecordKind.TEXT]), [b"a"]),
    "positions": ChunkInput(0, bytes([RecordKind.TEXT]), [b"a"], positions=[5]),
    "more records than a chunk has": ChunkInput(0, bytes(9), [b"a"] * 9),
    "no records": ChunkInput(0, b"", []),
    "kept fields that are not UTF-8": ChunkInput(0, bytes([RecordKind.TEXT]), [b"a"], kept=[b"\xff"]),
    "text that is too long": ChunkInput(0, bytes([RecordKind.TEXT]), [b"a" * (1024 * 1024 + 1)]),
}


def test_a_chunk_that_the_library_would_not_make_is_refused(here: Here, outside: Outside) -> None:
    key = Path(outside.settings.api_key_file).read_text().strip()
    with outside.gateway.client(key) as client:
        made = client.post("/v1/jobs", json={"model": "dummy", "hardware": "dummy", "chunk_size": 8}).json()
        path = f"/v1/jobs/{made['id']}/chunks"
        for what, chunk in BAD.items():
            refused = client.put(f"{path}/0?token=ab", content=encode_input(chunk))
            assert refused.status_code == 400, what
        bodies = (b"", b"EMBC", encode_input(BAD["positions"])[:-1], b"x" * 64)
        assert {client.put(f"{path}/0?token=ab", content=body).status_code for body in bodies} == {400}
        assert client.put(f"{path}/0?token=ab", content=bytes(17 * 1024 * 1024)).status_code == 413
        assert client.put(f"{path}/0?token=or+not", content=b"").status_code == 400
        for number in ("9" * 5000, "-1", "x"):  # more digits than Python converts
            assert client.get(f"{path}/{number}/result").status_code == 404
            assert client.get(f"{path}/0/result?size={number}").status_code == 400
        for after in ("%D9%A1", "x", ""):  # a digit that is none of Redis'
            assert client.get(f"/v1/jobs/{made['id']}/events?after={after}").status_code == 400
            assert client.get(f"/v1/jobs?after={after}").status_code == 400
        for seconds in ("1e39", "11", "-1", "nan", "x"):
            assert client.get(f"/v1/jobs/{made['id']}/events?wait_s={seconds}").status_code == 400
        assert client.post(f"/v1/jobs/{made['id']}/steps/complete", json={}).status_code == 404
        assert client.post(f"/v1/jobs/{made['id']}/steps/seal", json={"chunks": "1"}).status_code == 400
        for numbers in ([2**32], [2**53 - 1], [-1], ["1"]):  # more than a bitmap of Redis has
            assert (
                client.post(f"/v1/jobs/{made['id']}/steps/free_drained", json={"numbers": numbers}).status_code == 400
            )
        of_none = client.post(f"/v1/jobs/{made['id']}/steps/drained_facts", json={"names": []})
        assert of_none.json() == {"answer": []}
        many = {"column_types": {f"{number} {'x' * 1000}": "int64" for number in range(200)}}
        for options in (
            many,
            {"normalize": "yes"},
            {"dimensions": True},
            {"keep": [1]},
            {"data": "x"},
            {"max_errors": -1},
        ):
            assert client.post("/v1/jobs", json=options).status_code == 400, options
    assert here.broker.jobs.status(made["id"]).chunks == 0

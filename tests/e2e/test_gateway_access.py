"""Who may call what: strangers, and holders of keys for each verb."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from embedctl import Job, enqueue_embeddings
from embedctl_config.errors import NotPermitted
from embedctl_config.settings import Settings
from embedctl_gateway.access.key_file import add_key, remove_key
from embedctl_gateway.access.verbs import VERBS
from embedctl_gateway.calls import openapi, steps
from tests.support.gateway import gateway_with_keys, running_gateway
from tests.support.here import Here
from tests.support.waiting import eventually

#: What everybody may ask of a gateway with keys, and no more.
OPEN = {("GET", "/health"), ("GET", "/ready"), ("GET", "/docs"), ("GET", "/openapi.json")}
STEPS = "/v1/jobs/{id}/steps/{step}"
#: What stands in the places of paths.
PLACES = {"id": "x", "name": "dummy", "chunk": "0", "what": "input"}
#: What a caller may not decide about a job.
FORBIDDEN: list[dict[str, object]] = [{"tenant": "ads"}, {"data": "s3://elsewhere"}, {"state": "done"}]


class Described(NamedTuple):
    """A call as the description has it."""

    method: str
    path: str
    verbs: set[str]
    error: str


def described() -> Iterator[Described]:
    """All calls of the description; of the one of steps, each step."""
    for path, calls in openapi.document()["paths"].items():
        for method, call in calls.items():
            verbs = {verb for each in call["security"] for verb in each.get("key", [])}
            error = call["responses"]["500"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            if path == STEPS:
                for step in steps.STEPS:
                    may = verbs if step in steps.READING_STEPS else verbs - {"read"}
                    yield Described("POST", path.replace("{step}", step), may, error)
            else:
                yield Described(method.upper(), path, verbs, error)


def test_every_call_states_its_verbs() -> None:
    calls = list(described())
    assert {(each.method, each.path) for each in calls if not each.verbs} == OPEN
    assert set().union(*(each.verbs for each in calls)) == set(VERBS)


def test_each_kind_of_key_may_do_what_the_description_says(
    settings: Settings, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl_gateway.access.callers._AT_ONCE", 1000)
    path = short_folder / "keys"
    keys = {verb: add_key(path, verb, "search", [verb]) for verb in VERBS}
    keys |= {"nobody": "", "guess": f"{keys['embed'][:-1]}_"}
    with running_gateway(settings.replace(gateway_keys_file=str(path))) as gateway:
        for holder, key in keys.items():
            with gateway.client(key) as client:
                for call in described():
                    answer = client.request(
                        call.method, call.path.format(id="x", name="dummy", chunk="0", what="input")
                    )
                    check(call, holder, answer)


def check(call: Described, holder: str, answer: httpx2.Response) -> None:
    """Who has a key for a verb, no key or a wrong one has the answer that the description says."""
    told = f"{holder}: {call.method} {call.path}: {answer.status_code} {answer.text}"
    assert answer.headers["x-content-type-options"] == "nosniff", told
    if not call.verbs or holder in call.verbs:
        assert answer.status_code not in (401, 403), told
        return
    has_key = holder in VERBS
    assert answer.status_code == (403 if has_key else 401), told
    assert answer.headers["www-authenticate"].startswith("Bearer"), told
    if call.error == "TeiError":
        message = answer.json()["error"]
    else:
        message = answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == ("missing_scope" if has_key else "invalid_api_key"), told
    assert ("the call needs one for " in message and holder in message) == has_key, told
    assert not has_key or all(each in message for each in call.verbs), told


def test_a_key_that_may_read_fetches_and_changes_nothing(here: Here, short_folder: Path) -> None:
    here.start_worker()
    keys = short_folder / "keys"
    files = {verb: short_folder / verb for verb in ("jobs", "read", "embed")}
    for verb, file in files.items():
        file.write_text(add_key(keys, verb, "search", [verb]))
    with running_gateway(here.settings.replace(gateway_keys_file=str(keys))) as gateway:
        apart = here.settings.replace(redis_url="", url=gateway.url, chunk_files="")
        of = {verb: apart.replace(api_key_file=str(file)) for verb, file in files.items()}
        job = enqueue_embeddings(["one", "", "three"], settings=of["jobs"])
        seen = Job.get(job.id, of["read"])
        assert (seen.wait(timeout=60).done, seen.vectors().shape[0]) == (2, 3)
        assert [error.position for error in seen.errors()] == [1]
        for attempt in (
            lambda: enqueue_embeddings(["one"], settings=of["read"]),
            seen.retry_failed,
            seen.stop,
            seen.cancel,
            seen.discard,
            lambda: Job.get(job.id, of["embed"]),
        ):
            with pytest.raises(NotPermitted, match=r"this key may not do that: .* needs one for jobs"):
                attempt()
        variables = {"EMBEDCTL_URL": gateway.url, "EMBEDCTL_API_KEY_FILE": str(files["read"])}
        variables |= dict.fromkeys(("EMBEDCTL_REDIS_URL", "EMBEDCTL_CHUNK_FILES"), "")
        assert "it is for read" in here.embedctl("discard", job.id, **variables, status=77).stderr
        job.discard()


def test_a_job_tells_its_caller_nothing_of_machines_and_places(here: Here, short_folder: Path) -> None:
    here.start_worker()
    file = short_folder / "key"
    with gateway_with_keys(here.settings, short_folder, "search") as (gateway, (key,)):
        file.write_text(key)
        apart = here.settings.replace(redis_url="", url=gateway.url, chunk_files="", api_key_file=str(file))
        job = enqueue_embeddings(["a text of the test"], settings=apart)
        assert job.wait(timeout=60).done == 1
        with gateway.client(key) as client:
            told = [client.get(f"/v1/{path}").text for path in (f"jobs/{job.id}", f"jobs/{job.id}/events", "models")]
            refused = [client.post("/v1/jobs", json={"model": "dummy", **each}).status_code for each in FORBIDDEN]
    assert refused == [403, 400, 400]
    pinned_by = here.broker.jobs.status(job.id).pinned_by
    assert pinned_by
    secrets = [pinned_by, socket.gethostname(), str(here.folder), "a text of the test"]
    assert [each for each in secrets if any(each in page for page in told)] == []


def test_all_gateways_refuse_a_key_that_was_removed(settings: Settings, short_folder: Path) -> None:
    with (
        gateway_with_keys(settings, short_folder, "search") as (one, (key,)),
        running_gateway(one.gateway.settings) as other,
        ExitStack() as opened,
    ):
        clients = [opened.enter_context(each.client(key)) for each in (one, other)]
        upload = opened.enter_context(one.connect())
        upload.sendall(
            f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
            f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {len(FORM)}\r\n\r\n".encode()
        )
        assert [each.get("/v1/files").status_code for each in clients] == [200, 200]
        eventually(lambda: one.gateway.admission.ledger._held, what="the upload's room")
        remove_key(short_folder / "keys", "search")
        for client in clients:
            eventually(lambda client=client: client.get("/v1/files").status_code == 401, what="the refusal")  # type: ignore[misc]  # mypy takes no lambda with a default
        upload.sendall(FORM)  # it began with the key
        assert upload.recv(65536).startswith(b"HTTP/1.1 401")


FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--b--\r\n'
)


def test_a_stranger_is_not_asked_for_a_body(settings: Settings, short_folder: Path) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 1000\r\n\r\n"
    with gateway_with_keys(settings, short_folder, "search") as (gateway, _), gateway.connect() as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")


def test_guesses_wait_and_holders_of_keys_do_not(
    settings: Settings, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl_gateway.access.callers._EVERY_S", 600.0)
    monkeypatch.setattr("embedctl_gateway.access.callers._LONGEST_PAUSE_S", 36_000.0)
    monkeypatch.setattr("embedctl_gateway.access.callers._AT_ONCE", 3)
    guess = b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer guess\r\n\r\n"
    with gateway_with_keys(settings, short_folder, "search") as (gateway, (key,)), ExitStack() as opened:
        with gateway.client("guess") as wrong:
            assert [wrong.get("/v1/files").status_code for _ in range(3)] == [401] * 3
        waiting = [opened.enter_context(gateway.connect()) for _ in range(20)]
        for each in waiting:
            each.sendall(guess)
        paid_at = gateway.gateway.access._guesses._paid_at
        eventually(lambda: max(paid_at.values()) - time.monotonic() > 20 * 600, what="the last guess")
        with gateway.client(key) as client:
            assert client.get("/v1/files").status_code == 200
        for each in waiting:
            each.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                each.recv(1)

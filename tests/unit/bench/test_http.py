"""`embedctl bench request --http`: its loads, its callers and its arithmetic."""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from embedctl_bench.peers.child import Unavailable
from embedctl_bench.request.http.client import ask, vectors_of
from embedctl_bench.request.http.loads import LENGTHS, Load, loads
from embedctl_bench.request.http.report import claims_of
from embedctl_bench.request.http.results import HttpResult, LoadResult, Turn
from embedctl_bench.request.http.servers import DIRECT, GATEWAY, INFINITY
from embedctl_bench.request.results import RequestPlan
from tests.support.waiting import eventually


@contextmanager
def server(status: int = 200) -> Iterator[tuple[str, list[int]]]:
    """Answers each text with its length; gives its URL, and how many requests were in flight at each one."""
    flying: list[int] = []
    now, lock = [0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                now[0] += 1
                flying.append(now[0])
            time.sleep(0.01)
            vectors = [np.array([len(text), 1], "<f4") for text in fields["input"]]
            data = [
                {"index": index, "embedding": base64.b64encode(each.tobytes()).decode()}
                for index, each in enumerate(vectors)
            ]
            body = json.dumps({"data": data[::-1]}).encode()
            with lock:
                now[0] -= 1
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", flying
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def test_loads_are_the_same_each_time_and_single_texts_have_their_tokens() -> None:
    plan = RequestPlan.of(2, quick=False)
    found = list(loads(plan, quick=False))
    assert found == list(loads(plan, quick=False))
    for load, tokens in zip(found, LENGTHS, strict=False):
        assert load.is_single
        assert {len(text.split()) + 2 for (text,) in load.requests} == {tokens}
        assert load.rounds(plan, quick=False) * len(load.requests) >= 100  # for the 99th percentile
    callers, requests = found[len(LENGTHS) :]
    assert callers.in_flight == 64
    assert {len(each) for each in callers.requests} == set(range(1, 9))
    assert (requests.in_flight, requests.texts) == (10, 255)
    assert found[0].rounds(plan, quick=False) > callers.rounds(plan, quick=False) == plan.rounds


def test_every_request_is_made_once_by_as_many_callers_as_are_asked_for() -> None:
    load = Load("few", "a few", 4, tuple(("a" * number, "b") for number in range(1, 21)))
    with server() as (url, flying):
        done = ask(url, "m", load)
    assert vectors_of(done.bodies)[:, 0].tolist() == [each for number in range(1, 21) for each in (number, 1)]
    assert len(flying) == len(done.latencies) == 20
    assert 1 < max(flying) <= 4
    assert all(0.01 <= each <= done.seconds for each in done.latencies)


def test_an_answer_that_is_no_200_fails_the_load() -> None:
    with server(503) as (url, _), pytest.raises(Unavailable, match="status 503"):
        ask(url, "m", Load("one", "one text", 1, (("a",),)))


def test_a_server_that_is_not_there_fails_the_load() -> None:
    with server() as (url, _):
        pass
    with pytest.raises(Unavailable, match="Refused"):
        ask(url, "m", Load("few", "a few", 3, (("a",),) * 5))


#: Says its URL, as the servers do, and answers that it has a model.
_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [1]}')
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""
_KILLED = """
import os, signal, sys
from pathlib import Path
from embedctl_bench.request.http.servers import _child
with _child([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), {}) as url:
    print(url.rpartition(":")[2], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel tells a child that its parent has ended")
def test_a_killed_benchmark_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, _SERVER, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    eventually(lambda: not listens(int(done.stdout)), what="the end of the server")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=120).close()
    except ConnectionRefusedError:
        return False
    return True


def result() -> HttpResult:
    single = Load("one-8", "one text of 8 tokens", 1, (("a",),) * 2)
    turns = {
        GATEWAY: [Turn(0.2, [0.1, 0.1]), Turn(0.4, [0.2, 0.2])],
        DIRECT: [Turn(0.18, [0.09, 0.09]), Turn(0.19, [0.09, 0.1])],
        INFINITY: [Turn(0.4, [0.2, 0.2]), Turn(0.3, [0.1, 0.2])],
    }
    return HttpResult("m", "cpu", [LoadResult(single, turns)], labels=dict.fromkeys(turns, "a server"))


def test_ratios_are_of_the_turns_of_a_round() -> None:
    load = result().loads[0]
    assert load.times(GATEWAY, INFINITY) == pytest.approx((2.0 + 0.75) / 2)
    assert load.times(GATEWAY, "another") is None
    assert load.behind(GATEWAY, DIRECT) == pytest.approx([10, 105])
    assert load.behind(GATEWAY, "another") == []
    row = load.row(GATEWAY)
    assert row["texts_per_s"] == pytest.approx(2 / 0.3)
    assert (row["p50"], row["p99"], row["_noisy"]) == (pytest.approx(150), None, True)


def test_claims_say_what_is_not_met() -> None:
    ahead, behind = claims_of(result())
    assert (ahead.ours, ahead.met) == ("1.38 × its rate", True)
    assert (behind.ours, behind.met) == ("p50 57.5 ms behind (10.0 to 105.0 in 2 rounds)", False)

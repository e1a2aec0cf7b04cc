"""Hostile requests: those that schemathesis makes from the gateway's own description, and mutated bytes."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from embedctl_gateway.access.key_file import add_key
from tests.support.here import Here
from tests.support.raw_requests import answers_to, mutated, requests_of
from tests.support.waiting import eventually

SCHEMATHESIS = Path(__file__).parents[2] / "build/schemathesis/bin/st"
#: The memory of the gateway may grow by this while it answers (KiB).
GROWTH_KIB = 48 * 1024
#: Mutated requests after which the gateway is looked at.
_A_ROUND = 1000
#: Rounds of schemathesis at once: making a request takes it ten times as long as answering takes the gateway.
_AT_ONCE = 3
#: Right requests that come too early or too late: OpenAI's clients would repeat one that is refused with 409.
CONFIG = """
hooks = "not_cut.py"

[checks]
negative_data_rejection.expected-statuses = ["4xx"]

[[operations]]
include-path = ["/v1/batches/{id}/cancel", "/v1/batches/{id}/retry"]
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "429"]

[[operations]]
include-path-regex = "^/v1/jobs"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "403", "404", "409", "429"]
"""

#: A client ends a path at these characters, and so would call another one, which may know no such method.
HOOKS = """
import schemathesis

@schemathesis.hook
def filter_path_parameters(context, path_parameters):
    return not any(set("#?") & set(str(value)) for value in (path_parameters or {}).values())
"""


class Fuzzed:
    """A gateway in a process of its own, and what was seen of it."""

    def __init__(self, url: str, pid: int, key: str) -> None:
        self.url, self.key = url, key
        self.requests, self.statuses = 0, Counter[int]()
        self._pid, self._began = pid, time.monotonic()
        self._before = self._peak = 0

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=60)

    def count(self, requests: int) -> None:
        """Count requests of a round, after which the gateway answers, and its memory is as it was after the first one:
        what it imports late is there then."""
        with self.client() as client:
            assert client.get("/health").status_code == 200
        self.requests += requests
        now = resident_kib(self._pid)
        self._before, self._peak = self._before or now, max(self._peak, now)
        passed = time.monotonic() - self._began
        told = f" {dict(sorted(self.statuses.items()))}" if self.statuses else ""
        print(f"{self.requests} requests in {passed:.0f} s, {now} KiB{told}", flush=True)
        assert self._peak - self._before < GROWTH_KIB


@pytest.fixture
def fuzzed(here: Here) -> Iterator[Fuzzed]:
    """A gateway with a key and a worker; no fault is in its log at the end."""
    here.start_worker()
    keys, log = here.folder / "keys", here.folder / "gateway.log"
    key = add_key(keys, "fuzz", "fuzz")
    environment = {**here.environment, "EMBEDCTL_HARDWARE": "auto"}
    command = [sys.executable, "-m", "embedctl_gateway", "--address", "0", "--keys", str(keys)]
    with log.open("w") as stream, subprocess.Popen(command, env=environment, stderr=stream) as process:
        try:
            eventually(lambda: "http://" in log.read_text(), what="the gateway's start")
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            assert found
            yield Fuzzed(found[0], process.pid, key)
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
    assert "Traceback" not in log.read_text(), log.read_text()[-5000:]
    assert " ERROR " not in log.read_text(), log.read_text()[-5000:]
    assert key not in log.read_text()


def resident_kib(pid: int) -> int:
    """The memory of a process that is in use."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1])


def description(client: httpx2.Client) -> dict[str, Any]:
    """The gateway's description, with what it serves in place of any name, so that requests get beyond a 404."""
    document: dict[str, Any] = client.get("/openapi.json").json()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "dummy", "input": ["x", ""]}}
    file_id = client.post("/v1/files", data={"purpose": "batch"}, files={"file": json.dumps(line).encode()}).json()[
        "id"
    ]
    create = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch_ids = [client.post("/v1/batches", json=create).json()["id"] for _ in range(3)]
    eventually(
        lambda: all(client.get(f"/v1/batches/{each}").json()["status"] == "completed" for each in batch_ids),
        what="the batches' ends",
    )
    schemas = document["components"]["schemas"]
    schemas["EmbeddingsRequest"]["properties"]["model"] = {"enum": ["dummy"]}
    schemas["PoolingRequest"]["properties"]["model"] = {"enum": ["dummy", None]}
    schemas["BatchRequest"]["properties"]["input_file_id"] = {"enum": [file_id]}
    for name in ("EmbeddingsRequest", "EmbedRequest"):
        schemas[name]["properties"]["dimensions"]["maximum"] = 16
    del schemas["PoolingRequest"]["properties"]["prompt_name"]  # the dummy has no prompts
    for name in ("EmbedRequest", "EmbedSparseRequest"):
        schemas[name]["properties"]["prompt_name"] = {"type": "null"}  # the dummy has no prompts
    for path, calls in document["paths"].items():
        for call in calls.values():
            for parameter in call.get("parameters", []):
                if parameter["in"] == "path" and path.startswith("/v1/batches/"):
                    parameter["schema"] = {"enum": batch_ids}
    return document


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_request_meets_a_fault(here: Here, fuzzed: Fuzzed, pytestconfig: pytest.Config) -> None:
    """Every answer is as described, comes in time, and is no 500; the gateway's memory stays flat."""
    if not SCHEMATHESIS.exists():
        pytest.skip("tests/support/get-schemathesis.sh has not installed schemathesis")
    with fuzzed.client() as client:
        schema = here.folder / "openapi.json"
        schema.write_text(json.dumps(description(client)))
    (here.folder / "not_cut.py").write_text(HOOKS)
    seeds, options = itertools.count(pytestconfig.getoption("--fuzz-seed")), ["--max-examples", "10"]
    at_once = 1
    with ThreadPoolExecutor(_AT_ONCE) as several:
        while fuzzed.requests < pytestconfig.getoption("--fuzz-cases"):
            begun = [several.submit(fuzz, schema, fuzzed, next(seeds), options) for _ in range(at_once)]
            fuzzed.count(sum(each.result() for each in begun))
            # The other phases would make the same requests again.
            at_once, options = _AT_ONCE, ["--max-examples", "60", "--phases", "fuzzing"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_bytes_meet_a_fault(fuzzed: Fuzzed, pytestconfig: pytest.Config) -> None:
    """Whatever bytes come, no answer is a fault, the next client is answered, and the gateway's memory stays flat."""
    draw = random.Random(pytestconfig.getoption("--fuzz-seed"))
    with fuzzed.client() as client:
        batch = next(iter(description(client)["paths"]["/v1/batches/{id}"].values()))["parameters"][0]["schema"][
            "enum"
        ][0]
        file = client.get(f"/v1/batches/{batch}").json()["output_file_id"]
    right, port = requests_of(fuzzed.key, [file, batch]), httpx2.URL(fuzzed.url).port
    assert port
    while fuzzed.requests < pytestconfig.getoption("--fuzz-cases"):
        sent = [mutated(draw, right) for _ in range(_A_ROUND)]
        fuzzed.statuses.update(asyncio.run(answers_to(port, sent, draw)))
        fuzzed.count(_A_ROUND)
        assert not {each for each in fuzzed.statuses if each >= 500}


def fuzz(schema: Path, fuzzed: Fuzzed, seed: int, options: Sequence[str]) -> int:
    """A round of requests; how many. Fails with what schemathesis says if an answer is wrong."""
    report, config = (schema.with_name(f"round-{seed}.{kind}") for kind in ("json", "toml"))
    config.write_text(CONFIG)
    command = [str(SCHEMATHESIS), "--config-file", str(config), "run", str(schema), "--url", fuzzed.url, *options]
    command += ["-H", f"Authorization: Bearer {fuzzed.key}", "--seed", str(seed)]
    command += ["--request-timeout", "30", "--warnings", "off", "--continue-on-failure"]
    command += ["--report", "json", "--report-json-path", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=schema.parent, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr[-2000:]}"
    return int(json.loads(report.read_text())["test_cases"]["generated"])

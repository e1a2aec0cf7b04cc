"""Requests that schemathesis makes from the gateway's own description, right ones and wrong ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from embedctl_gateway.access.key_file import add_key
from tests.support.here import Here
from tests.support.waiting import eventually

SCHEMATHESIS = Path(__file__).parents[2] / "build/schemathesis/bin/st"
#: The memory of the gateway may grow by this while it answers (KiB).
GROWTH_KIB = 48 * 1024
SEED = 7
#: Right requests that come too early or too late: OpenAI's clients would repeat one that is refused with 409.
CONFIG = """
[checks]
negative_data_rejection.expected-statuses = ["4xx"]

[[operations]]
include-path = ["/v1/batches/{id}/cancel", "/v1/batches/{id}/retry"]
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "429"]

[[operations]]
include-path-regex = "^/v1/jobs"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "403", "404", "409", "429"]
"""


@contextmanager
def gateway_process(environment: dict[str, str], keys: Path, log: Path) -> Iterator[tuple[str, int]]:
    """A gateway in a process of its own; gives its URL and its pid."""
    command = [sys.executable, "-m", "embedctl_gateway", "--address", "0", "--keys", str(keys)]
    with log.open("w") as stream, subprocess.Popen(command, env=environment, stderr=stream) as process:
        try:
            eventually(lambda: "http://" in log.read_text(), what="the gateway's start")
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            assert found
            yield found[0], process.pid
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()


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
    schemas["BatchRequest"]["properties"]["input_file_id"] = {"enum": [file_id]}
    for name in ("EmbeddingsRequest", "EmbedRequest"):
        schemas[name]["properties"]["dimensions"]["maximum"] = 16
    schemas["EmbedRequest"]["properties"]["prompt_name"] = {"type": "null"}  # the dummy has no prompts
    for path, calls in document["paths"].items():
        for call in calls.values():
            for parameter in call.get("parameters", []):
                if parameter["in"] == "path" and path.startswith("/v1/batches/"):
                    parameter["schema"] = {"enum": batch_ids}
    return document


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_meets_a_fault(here: Here, pytestconfig: pytest.Config) -> None:
    """Every answer is as described, comes in time, and is no 500; the gateway's memory stays flat."""
    if not SCHEMATHESIS.exists():
        pytest.skip("tests/support/get-schemathesis.sh has not installed schemathesis")
    here.start_worker()
    keys, log = here.folder / "keys", here.folder / "gateway.log"
    key = add_key(keys, "fuzz", "fuzz")
    wanted = pytestconfig.getoption("--fuzz-cases")
    with gateway_process({**here.environment, "EMBEDCTL_HARDWARE": "auto"}, keys, log) as (url, pid):
        with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
            schema = here.folder / "openapi.json"
            schema.write_text(json.dumps(description(client)))
        cases, before, peak, round_of = 0, 0, 0, 0
        while cases < wanted:
            report = here.folder / f"report-{round_of}.json"
            fuzz(schema, url, key, SEED + round_of, report)
            cases += json.loads(report.read_text())["test_cases"]["generated"]
            round_of += 1
            before = before or resident_kib(pid)  # after the first round: what the gateway imports late is there
            peak = max(peak, resident_kib(pid))
            print(f"{cases} requests, {resident_kib(pid)} KiB", flush=True)
        assert peak - before < GROWTH_KIB
    assert "Traceback" not in log.read_text()
    assert key not in log.read_text()


def fuzz(schema: Path, url: str, key: str, seed: int, report: Path) -> None:
    """A round of requests; fails with what schemathesis says if an answer is wrong."""
    config = report.with_suffix(".toml")
    config.write_text(CONFIG)
    command = [str(SCHEMATHESIS), "--config-file", str(config), "run", str(schema), "--url", url]
    command += ["-H", f"Authorization: Bearer {key}", "--seed", str(seed), "--max-examples", "10"]
    command += ["--request-timeout", "30", "--warnings", "off", "--continue-on-failure"]
    command += ["--report", "json", "--report-json-path", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=report.parent, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-2000:]}"

"""`embedctl bench` as a user runs it, with a small model: whole, and interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import MakeModel, Tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = (sys.executable, "-m", "embedctl", "bench")
OPTIONS = ("--quick", "--model", "tiny", "-o", "report", "--class", "dummy", "--peers", "none")
Tables = dict[str, list[dict[str, Any]]]
#: Its processes start without torch, so most tests use it; its vectors are not the model's.
DUMMY = '[classes.dummy]\nbackend = "dummy"\noptions = {dim = 32}\n'


@pytest.fixture
def environment(tiny_model: MakeModel, short_folder: Path, cache_folder: Path) -> dict[str, str]:
    """With a small model of many positions, and folders of this test's own for all that is written, but the cache."""
    config = short_folder / "embedctl.toml"
    model = tiny_model(Tiny(positions=512, max_seq_length=64))
    config.write_text(f'[models.tiny]\nsource = "{model}"\n{DUMMY}')
    (short_folder / "tmp").mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDCTL_")}
    return {
        **own,
        "EMBEDCTL_CONFIG": str(config),
        "EMBEDCTL_CACHE_DIR": str(cache_folder),
        "TMPDIR": str(short_folder / "tmp"),
    }


def tables(environment: dict[str, str], folder: Path, name: str, *more: str, page: str = "") -> Tables:
    """Run a verb; the rows of the report's tables, whose path was printed. Nothing else is left."""
    command = [*COMMAND, name, *OPTIONS, *more]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    written = folder / done.stdout.strip()
    assert written.name == f"{page or name}.md"
    assert list((folder / "tmp").glob("embedctl-bench-*")) == []
    report = json.loads(written.with_suffix(".json").read_text())
    return {table["name"]: table["rows"] for table in report["tables"]}


def test_a_request_that_was_interrupted_resumes(environment: dict[str, str], short_folder: Path) -> None:
    command = [*COMMAND, "request", *OPTIONS]
    with subprocess.Popen(
        command, env=environment, cwd=short_folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        told = []
        for line in process.stderr:
            told.append(line)
            if "/loading/" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.communicate(timeout=120)[1]
    assert process.returncode == 130, "".join(told) + rest
    assert "Stopped with Ctrl-C" in (short_folder / "report" / "request.md").read_text()
    assert list((short_folder / "tmp").glob("embedctl-bench-*")) == []

    (row,) = tables(environment, short_folder, "request")["tiny-figures"]
    assert row["system"] == "embedctl, class dummy"
    assert "not fp32" in row["remark"]
    assert row["texts_per_s"] == pytest.approx(30 / row["seconds"])
    # Random weights have no say in how much of a text is encoded: all of it is.
    assert row["tokens_per_s"] * row["seconds"] > 30 * 64
    assert 0 < row["p50_ms"] <= row["p90_ms"]
    page = (short_folder / "report" / "request.md").read_text()
    assert "**A quick run** (`--quick`)" in page


def test_requests_over_http(environment: dict[str, str], short_folder: Path) -> None:
    found = tables(environment, short_folder, "request", "--http", page="request-http")
    rows, servers = found["tiny-class-dummy-figures"], found["tiny-class-dummy-systems"]
    assert [row["system"] for row in servers] == [
        "embedctl gateway, class dummy",
        "the same engine in the server's process, class dummy",
    ]
    assert len({row["max_abs_error"] for row in rows}) == 1
    assert len(rows) == 6 * 2
    assert all(0 < row["p50_ms"] <= row["p90_ms"] and row["texts_per_s"] > 0 for row in rows)

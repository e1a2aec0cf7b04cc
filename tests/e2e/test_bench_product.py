"""`embedctl bench` as a user runs it, with a small model: interrupted, and resumed to its end."""

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

OPTIONS = ("--http", "--quick", "--model", "tiny", "-o", "report", "--class", "dummy", "--peers", "none")
COMMAND = (sys.executable, "-m", "embedctl", "bench", "request", *OPTIONS)
#: Its processes start without torch; its vectors are not the model's.
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


def test_requests_over_http_that_were_interrupted_resume(environment: dict[str, str], short_folder: Path) -> None:
    """Both in one test, because each run imports sentence-transformers twice."""
    folder, page = short_folder, short_folder / "report" / "request-http.md"
    with subprocess.Popen(
        COMMAND, env=environment, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
    assert "Stopped with Ctrl-C" in page.read_text()

    done = subprocess.run(COMMAND, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert folder / done.stdout.strip() == page
    assert list((folder / "tmp").glob("embedctl-bench-*")) == []
    assert "**A quick run** (`--quick`)" in page.read_text()
    tables: dict[str, list[dict[str, Any]]] = {
        table["name"]: table["rows"] for table in json.loads(page.with_suffix(".json").read_text())["tables"]
    }
    rows, servers = tables["tiny-class-dummy-figures"], tables["tiny-class-dummy-systems"]
    assert [row["system"] for row in servers] == [
        "embedctl gateway, class dummy",
        "the same engine in the server's process, class dummy",
    ]
    assert len({row["max_abs_error"] for row in rows}) == 1
    assert len(rows) == 7 * 2
    assert all(0 < row["p50_ms"] <= row["p90_ms"] and row["texts_per_s"] > 0 for row in rows)

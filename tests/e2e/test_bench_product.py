"""`embedctl bench` as a user runs it, with a small model: each verb whole, one interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for _needed in ("torch", "sentence_transformers"):
    pytest.importorskip(_needed)

from tests.support.tiny_models import Tiny  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = (sys.executable, "-m", "embedctl", "bench")
OPTIONS = ("--quick", "--model", "tiny", "-o", "report", "--class")
#: Its processes start without torch, so most tests use it; its vectors are not the model's.
DUMMY = '[classes.dummy]\nbackend = "dummy"\noptions = {dim = 32}\n'


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test makes for the model, such as references, the next ones find."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(tiny_model: Callable[[Tiny], Path], short_folder: Path, cache: Path) -> dict[str, str]:
    """With a small model of many positions, and folders of this test's own for all that is written, but the cache."""
    config = short_folder / "embedctl.toml"
    model = tiny_model(Tiny(positions=512, max_seq_length=64))
    config.write_text(f'[models.tiny]\nsource = "{model}"\n{DUMMY}')
    (short_folder / "tmp").mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDCTL_")}
    return {
        **own,
        "EMBEDCTL_CONFIG": str(config),
        "EMBEDCTL_CACHE_DIR": str(cache),
        "TMPDIR": str(short_folder / "tmp"),
    }


def bench(
    environment: dict[str, str], folder: Path, name: str, hardware: str, *more: str
) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, name, *OPTIONS, hardware, "--peers", "none", *more]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)


def tables_of(done: subprocess.CompletedProcess[str], folder: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of the report's tables, whose path was printed; and nothing else is left."""
    assert done.returncode == 0, done.stderr
    page = folder / done.stdout.strip()
    assert page.name == f"{name}.md"
    assert list((folder / "tmp").glob("embedctl-bench-*")) == []
    report = json.loads(page.with_suffix(".json").read_text())
    return {table["name"]: table["rows"] for table in report["tables"]}


def test_a_request_that_was_interrupted_resumes_and_then_measures_nothing_again(
    environment: dict[str, str], short_folder: Path
) -> None:
    command = [*COMMAND, "request", *OPTIONS, "dummy", "--peers", "none"]
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

    tables = tables_of(bench(environment, short_folder, "request", "dummy"), short_folder, "request")
    (row,) = tables["tiny-figures"]
    assert row["system"] == "embedctl, class dummy"
    assert "not fp32" in row["remark"]
    assert row["texts_per_s"] == pytest.approx(30 / row["seconds"])
    # Random weights have no say in how much of a text is encoded: all of it is.
    assert row["tokens_per_s"] * row["seconds"] > 30 * 64
    assert 0 < row["p50_ms"] <= row["p90_ms"]
    kept = (short_folder / "report" / "measurements.jsonl").read_text()
    again = tables_of(bench(environment, short_folder, "request", "dummy"), short_folder, "request")
    assert (short_folder / "report" / "measurements.jsonl").read_text() == kept
    assert again["tiny-figures"] == [row]
    page = (short_folder / "report" / "request.md").read_text()
    assert "**A quick run** (`--quick`)" in page
    assert "- taken from earlier runs: 3 steps in " in page


def test_requests_over_http(environment: dict[str, str], short_folder: Path) -> None:
    tables = tables_of(bench(environment, short_folder, "request", "dummy", "--http"), short_folder, "request-http")
    rows, servers = tables["tiny-class-dummy-figures"], tables["tiny-class-dummy-systems"]
    assert [row["system"] for row in servers] == [
        "embedctl gateway, class dummy",
        "the same engine in the server's process, class dummy",
    ]
    assert len({row["max_abs_error"] for row in rows}) == 1
    assert len(rows) == 6 * 2
    assert all(0 < row["p50_ms"] <= row["p90_ms"] and row["texts_per_s"] > 0 for row in rows)


def test_engines_are_ranked_beside_the_floor(environment: dict[str, str], short_folder: Path) -> None:
    tables = tables_of(
        bench(environment, short_folder, "engines", "dummy", "--workload", "W1"), short_folder, "engines"
    )
    rows = {row["system"]: row for row in tables["tiny-W1-figures"]}
    reference, floor = rows.pop("sentence-transformers, torch"), rows.pop("floor")
    assert set(rows) == {"embedctl's engine, class dummy", "embedctl, class dummy"}
    assert (reference["rank"], reference["times"]) == (1, 1)
    assert float(reference["max_abs_error"]) <= 1e-4
    for row in (reference, *rows.values()):
        assert row["texts_per_s"] == pytest.approx(256 / row["seconds"])
        assert row["share_of_floor"] > 0
    assert {row["rank"] for row in rows.values()} == {None}, "its vectors are others"
    assert floor["gflops"] > 0


def test_a_grid_of_one_cell(environment: dict[str, str], short_folder: Path) -> None:
    cell = ("--cores", "1", "--length", "8", "--batch", "2")
    tables = tables_of(bench(environment, short_folder, "grid", "dummy", *cell), short_folder, "grid")
    rows = {row["system"]: row for row in tables["tiny-1-core-figures"]}
    assert set(rows) == {"embedctl's engine, class dummy", "transformers", "floor"}
    assert {(row["length"], row["batch"]) for row in rows.values()} == {(8, 2)}
    assert rows["transformers"]["share_of_floor"] > 0
    assert float(rows["transformers"]["max_abs_error"]) <= 1e-4
    assert rows["transformers"]["times"] == 1

"""`embedctl bench request` and `engines` as a user runs them, with a small model: whole, resumed and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

for _needed in ("torch", "sentence_transformers", "matplotlib", "jinja2"):
    pytest.importorskip(_needed)

from tests.support.tiny_models import Tiny  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = (sys.executable, "-m", "embedctl", "bench")
OPTIONS = ("--quick", "--model", "tiny", "--class", "cpu", "-o", "report", "--peers")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test makes for the model, such as references, the next ones find."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(tiny_model: Callable[[Tiny], Path], short_folder: Path, cache: Path) -> dict[str, str]:
    """With a small model of many positions, and folders of this test's own for all that is written, but the cache."""
    config = short_folder / "embedctl.toml"
    model = tiny_model(Tiny(positions=512, max_seq_length=64))
    config.write_text(f'[models.tiny]\nsource = "{model}"\n')
    (short_folder / "tmp").mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDCTL_")}
    return {
        **own,
        "EMBEDCTL_CONFIG": str(config),
        "EMBEDCTL_CACHE_DIR": str(cache),
        "TMPDIR": str(short_folder / "tmp"),
    }


def bench(
    environment: dict[str, str], folder: Path, name: str, peers: str, *more: str
) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, name, *OPTIONS, peers, *more]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)


def test_a_class_goes_through_the_whole_product_and_a_second_run_measures_nothing_again(
    environment: dict[str, str], short_folder: Path
) -> None:
    done = bench(environment, short_folder, "request", "none")
    assert done.returncode == 0, done.stderr
    page = short_folder / done.stdout.strip()
    assert page.name == "request.html"
    report = json.loads((page.parent / "request.json").read_text())
    tables = {table["name"]: table["rows"] for table in report["tables"]}
    (row,), (system,) = tables["rounds"], tables["systems"]
    assert row["system"] == system["system"] == "embedctl, class cpu"
    assert float(system["max_abs_error"]) <= 1e-4
    assert row["sentences_per_s"] == pytest.approx(30 / row["seconds_for_10"])
    # Random weights have no say in how much of a text is encoded: all of it is.
    assert row["tokens_per_s"] * row["seconds_for_10"] > 30 * 64
    assert 0 < row["p50"] <= row["p95"]
    assert 0 < row["seconds_for_10"] <= row["fetched_s"]
    assert list((short_folder / "tmp").glob("embedctl-bench-*")) == []

    kept = (page.parent / "measurements.jsonl").read_text()
    again = bench(environment, short_folder, "request", "none")
    assert again.returncode == 0, again.stderr
    assert (page.parent / "measurements.jsonl").read_text() == kept
    (same,) = next(
        table for table in json.loads((page.parent / "request.json").read_text())["tables"] if table["name"] == "rounds"
    )["rows"]
    assert same == row


def test_requests_over_http(environment: dict[str, str], short_folder: Path) -> None:
    done = bench(environment, short_folder, "request", "none", "--http")
    assert done.returncode == 0, done.stderr
    report = json.loads((short_folder / done.stdout.strip()).with_suffix(".json").read_text())
    rows, servers = (table["rows"] for table in report["tables"])
    assert [row["server"] for row in servers] == [
        "embedctl gateway, class cpu",
        "the same engine in the server's process, class cpu",
    ]
    assert all(float(row["cosine"]) > 0.99999 for row in servers)
    assert len(rows) == 6 * 2
    assert all(0 < row["p50"] <= row["p90"] and row["texts_per_s"] > 0 for row in rows)
    assert list((short_folder / "tmp").glob("embedctl-bench-*")) == []


def test_engines_are_ranked_beside_the_floor_and_a_second_run_measures_nothing_again(
    environment: dict[str, str], short_folder: Path
) -> None:
    done = bench(environment, short_folder, "engines", "none", "--workload", "W1")
    assert done.returncode == 0, done.stderr
    page = short_folder / done.stdout.strip()
    assert page.name == "engines.html"
    tables = {
        table["name"]: table["rows"] for table in json.loads((page.parent / "engines.json").read_text())["tables"]
    }
    rows = {row["system"]: row for row in tables["tiny-W1-fp32"]}
    ours = ["embedctl's engine, class cpu", "embedctl, class cpu"]
    assert set(rows) == {*ours, "sentence-transformers, torch"}
    assert sorted(row["rank"] for row in rows.values()) == [1, 2, 3]
    for row in rows.values():
        assert row["sentences_per_s"] == pytest.approx(256 / row["seconds"])
        assert float(row["max_abs_error"]) <= 1e-4
        assert row["share_of_floor"] > 0
    assert rows["sentence-transformers, torch"]["times_sentence_transformers"] == 1
    assert "floor" in {row["system"] for row in tables["tiny-W1-systems"]}
    assert list((short_folder / "tmp").glob("embedctl-bench-*")) == []

    kept = (page.parent / "measurements.jsonl").read_text()
    again = bench(environment, short_folder, "engines", "none", "--workload", "W1")
    assert again.returncode == 0, again.stderr
    assert (page.parent / "measurements.jsonl").read_text() == kept


def test_ctrl_c_leaves_a_report_and_nothing_else(environment: dict[str, str], short_folder: Path) -> None:
    command = [*COMMAND, "request", *OPTIONS, "none"]
    with subprocess.Popen(
        command, env=environment, cwd=short_folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        told = []
        for line in process.stderr:
            told.append(line)
            if "choosing its setting" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.communicate(timeout=120)[1]
    assert process.returncode == 130, "".join(told) + rest
    assert "Stopped with Ctrl-C" in (short_folder / "report" / "request.md").read_text()
    assert list((short_folder / "tmp").glob("embedctl-bench-*")) == []


def test_an_unknown_peer_is_refused_before_anything_is_measured(
    environment: dict[str, str], short_folder: Path
) -> None:
    done = bench(environment, short_folder, "request", "fastembd")
    assert done.returncode == 2
    assert "--peers: there is no fastembd. Known: st-torch," in done.stderr
    assert not (short_folder / "report").exists()

"""`embedctl model quality`: what smaller vectors cost in ranking, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from embedctl_workers.commands import quality
from embedctl_workers.commands.model import main
from embedctl_workers.machine import devices
from embedctl_workers.machine.host import Host
from tests.support.tiny_models import MakeModel, Tiny

Run = Callable[..., Result]


@pytest.fixture
def run(tiny_model: MakeModel, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command to a status in this process, which has torch; it is neither pinned nor made to log."""
    config = tmp_path / "embedctl.toml"
    config.write_text(f'[models.tiny]\nsource = "{tiny_model(Tiny())}"\n')
    monkeypatch.setenv("EMBEDCTL_CONFIG", str(config))
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(host.cache))
    monkeypatch.setattr(devices, "pin", lambda cpus: devices.Pinned(frozenset(os.sched_getaffinity(0)), 1))
    monkeypatch.setattr(quality, "log_plainly", lambda: None)

    def run(*options: str, status: int = 0) -> Result:
        done = CliRunner().invoke(main, ["quality", "tiny", "--class", "cpu", *options])
        assert done.exit_code == status, done.output
        return done

    return run


def test_what_smaller_vectors_cost_is_measured(run: Run) -> None:
    smaller = ("--dims", "32", "--dims", "8", "--dtype", "int8", "--dtype", "float32")
    found = json.loads(run(*smaller, "--json").stdout)
    rows = {(row["dims"], row["dtype"]): (row["bytes"], row["overlap@10"]) for row in found}
    assert rows.keys() == {(32, "float32"), (32, "int8"), (8, "float32"), (8, "int8")}
    assert (rows[32, "float32"], rows[8, "int8"][0]) == ((128, 1), 8)
    assert rows[8, "float32"][1] < rows[32, "int8"][1] < 1
    table = run("--dims", "16")
    assert [line.split()[:4] for line in table.stdout.splitlines()[1::3]] == [
        ["dense", "16", "float32", "64"],
        ["dense", "16", "binary", "2"],
    ]
    assert "leave out --dims, or cut them with --dims-anyway" in table.stderr


@pytest.mark.parametrize(
    ("wrong", "why"), [(("--vectors", "sparse"), "gives no sparse vectors"), (("--dims", "33"), "have 32")]
)
def test_what_the_model_does_not_give_is_refused(run: Run, wrong: tuple[str, str], why: str) -> None:
    assert why in run(*wrong, status=2).stderr

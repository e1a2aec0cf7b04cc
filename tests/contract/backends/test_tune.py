"""The processes that `embedctl model tune` measures with, on the dummy backend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embedctl_config.errors import ModelError
from embedctl_workers.commands.tune import _measured


@pytest.fixture(autouse=True)
def _configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "embedctl.toml"
    config.write_text(
        '[classes.paced]\nbackend = "dummy"\noptions = { seconds_per_batch = 0.05 }\n'
        '[classes.odd]\nbackend = "dummy"\noptions = { unknown = 1 }\n'
    )
    monkeypatch.setenv("EMBEDCTL_CONFIG", str(config))
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
def test_larger_batches_are_faster_where_a_batch_costs_as_much_as_another() -> None:
    cpu = min(os.sched_getaffinity(0))
    with _measured("paced", "dummy", [frozenset({cpu})]) as (facts, ask):
        assert facts["threads"] == 1
        assert len(bytes.fromhex(facts["fingerprint"])) == 32
        small, large = ask(256), ask(1024)
    assert 256 / 0.05 * 0.2 < small < 256 / 0.05
    assert large > 2 * small


def test_a_model_that_cannot_be_loaded_is_said_so(capfd: pytest.CaptureFixture[str]) -> None:
    cpu = min(os.sched_getaffinity(0))
    with pytest.raises(ModelError, match="can't be measured"), _measured("odd", "dummy", [frozenset({cpu})]):
        pass
    assert "unknown" in capfd.readouterr().err

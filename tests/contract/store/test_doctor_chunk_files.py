"""What `embedctl doctor` says of the store of chunks outside of Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedctl.doctor import Finding, Level, examine
from embedctl_config.settings import Settings


def found(settings: Settings) -> Finding:
    (finding,) = (each for each in examine(settings) if each.subject == "chunk_files")
    return finding


@pytest.mark.in_redis
def test_a_place_that_works_is_told_with_the_time_that_it_takes(settings: Settings, tmp_path: Path) -> None:
    finding = found(settings.replace(chunk_files=str(tmp_path / "data")))
    assert (finding.level, "put and got in" in finding.found) == (Level.OK, True)
    assert [path.name for path in (tmp_path / "data").rglob("*") if path.is_file()] == ["embedctl-chunks.json"]


@pytest.mark.in_redis
def test_a_place_that_does_not_exist_is_a_failure(settings: Settings, tmp_path: Path) -> None:
    finding = found(settings.replace(chunk_files=str(tmp_path / "not" / "mounted")))
    assert finding.level is Level.FAIL
    assert str(tmp_path) in finding.found

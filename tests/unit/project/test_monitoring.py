"""The alert rules and the dashboard in deploy/ ask for metrics that there are, and Prometheus and Grafana read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "embedctl.rules.yml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "embedctl.json").read_text(encoding="utf-8"))
#: Tests compare the page's tables with what workers and `embedctl metrics` serve.
DOCUMENTED = dict(
    re.findall(
        r"^\| `(embedctl_\w+)` \|(?: \w+ \|)? ([^|]*) \|",
        (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)
#: What a histogram's samples are called.
PARTS = re.compile(r"_seconds_(bucket|sum|count)$")
#: Labels that Prometheus makes.
OTHERS = {"instance", "job", "le", "__name__"}
LABELS = {label for labels in DOCUMENTED.values() for label in re.findall(r"`(\w+)`", labels)} | OTHERS


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def test_a_query_asks_for_metrics_and_labels_that_there_are() -> None:
    for name, query in queries():
        metrics = {PARTS.sub("_seconds", each) for each in re.findall(r"\bembedctl_\w+", query)}
        assert metrics <= set(DOCUMENTED), name
        known = {label for metric in metrics for label in re.findall(r"`(\w+)`", DOCUMENTED[metric])} | OTHERS
        asked = set(re.findall(r"(\w+)(?:=~|!=|!~|=)\"", query))
        for grouped in re.findall(r"\b(?:by|without|on) \(([^)]*)\)", query):
            asked |= set(filter(None, grouped.split(", ")))
        assert asked <= known, name


def test_the_dashboard_shows_every_metric_that_tells_the_backlog() -> None:
    shown = {each for _, query in queries() for each in re.findall(r"\bembedctl_\w+", query)}
    backlog = {name for name in DOCUMENTED if re.search("waiting|backlog_age|standstill|alive|jobs_active", name)}
    left_out = {"embedctl_waiting_bytes", "embedctl_tenant_waiting_chunks", "embedctl_tenant_waiting_tokens"}
    assert backlog - shown == left_out


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    assert DASHBOARD["uid"] == DASHBOARD["title"] == "embedctl"
    assert "id" not in DASHBOARD  # Grafana gives it one
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    names = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "hardware_class", "model"}
    for panel in panels():
        assert panel["type"] in ("stat", "timeseries")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        used = set(re.findall(r"\$(\w+)", json.dumps(panel))) - {"__rate_interval"}
        assert used <= names
        for target in panel["targets"]:
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert labels <= LABELS


def need_promtool() -> str:
    """The path of promtool. If there is none, the test is skipped; in CI it fails."""
    unpacked = ROOT / "build" / "promtool" / "promtool"
    found = str(unpacked) if unpacked.is_file() else shutil.which("promtool")
    if found is None:
        reason = "there is no promtool: `tests/support/get-promtool.sh` unpacks Debian's, as root"
        return (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return found


@pytest.mark.slow
def test_promtool_finds_the_rules_good_and_reads_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"query_{at}", "expr": query.replace("$__rate_interval", "5m").replace("$", "")}
        for at, (_, query) in enumerate(queries())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    for arguments in (["check", "rules", RULES.name, str(file)], ["test", "rules", "embedctl.rules.test.yml"]):
        command = [need_promtool(), *arguments]
        checked = subprocess.run(command, cwd=RULES.parent, capture_output=True, text=True, timeout=120, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_promtool_reads_what_the_pages_have_for_prometheus(tmp_path: Path) -> None:
    # Debian's promtool does not know Kubernetes.
    pages = [(ROOT / "docs" / f"{page}.md").read_text("utf-8") for page in ("gateway", "metrics")]
    found = [each for page in pages for each in re.findall(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)]
    assert len(found) == len(pages)
    for number, text in enumerate(found):
        (tmp_path / f"{number}.yml").write_text(text)
    files = [str(file) for file in sorted(tmp_path.iterdir())]
    command = [need_promtool(), "check", "config", "--syntax-only", *files]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr

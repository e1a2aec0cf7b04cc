"""The manifests in deploy/kubernetes: what they must say, whatever else they say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedctl_config.address import address_of
from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from tests.support.packages import need

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(set(FOLDER.glob("*.yaml")) - {FOLDER / "kustomization.yaml"})
MANIFESTS: list[dict[str, Any]] = [
    each for file in FILES for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]
#: What the schema of KEDA's ScaledObject, version v1alpha1, knows, as far as it is used here; its metadata are texts.
NUMBERS = {"minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"}
TRIGGER = {"type", "metricType", "metadata"}


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in MANIFESTS if each["kind"] == kind}


DEPLOYMENTS = of_kind("Deployment")
WORKERS = [name for name in DEPLOYMENTS if name != "embedctl-metrics"]


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = DEPLOYMENTS[name]["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return dict(only)


def settings_of(name: str, folder: Path) -> Settings:
    """The settings of a container, with its files in a folder of the test."""
    variables = {each["name"]: each["value"] for each in container(name).get("env", [])}
    password = folder / Path(variables["EMBEDCTL_REDIS_PASSWORD_FILE"]).name
    password.write_text("x" * 43)
    variables["EMBEDCTL_REDIS_PASSWORD_FILE"] = str(password)
    if "EMBEDCTL_CONFIG" in variables:
        file = folder / Path(variables["EMBEDCTL_CONFIG"]).name
        file.write_text(of_kind("ConfigMap")["embedctl-settings"]["data"][file.name])
        variables["EMBEDCTL_CONFIG"] = str(file)
    return load_settings(variables)


def test_all_files_are_applied() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert sorted(listed) == [file.name for file in FILES]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_kubernetes_takes_them(version: str) -> None:
    kubernetes_validate = need("kubernetes_validate")
    for manifest in MANIFESTS:
        if manifest["kind"] != "ScaledObject":
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", list(of_kind("ScaledObject")))
def test_keda_takes_its_objects_and_keeps_workers_where_it_knows_nothing(name: str) -> None:
    scaled = of_kind("ScaledObject")[name]
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    assert set(scaled["spec"]) <= {"scaleTargetRef", *NUMBERS, "triggers"}
    assert scaled["spec"]["scaleTargetRef"] == {"name": name}
    assert name in WORKERS
    assert "replicas" not in DEPLOYMENTS[name]["spec"]  # a new apply would undo what KEDA did
    assert all(type(scaled["spec"][number]) is int for number in NUMBERS)
    (trigger,) = scaled["spec"]["triggers"]
    assert set(trigger) == TRIGGER
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert float(trigger["metadata"]["threshold"]) > 0
    query = trigger["metadata"]["query"]
    model = tomllib.loads(of_kind("ConfigMap")["embedctl-settings"]["data"]["embedctl.toml"])["model"]
    hardware = name.removeprefix("embedctl-")
    assert query == (
        f'sum(embedctl_waiting_tokens{{hardware_class="{hardware}", model="{model}"}}) '
        "or sum(0 * embedctl_backlog_age_seconds)"
    )
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"| `{metric}` |" in page for metric in re.findall(r"embedctl_\w+", query))


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_time_to_finish_and_to_report_that_it_hangs(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    assert pod(name)["terminationGracePeriodSeconds"] > settings.hang_s
    probe = container(name)["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > settings.hang_s
    assert container(name)["args"] == ["worker", "--class", name.removeprefix("embedctl-")]
    assert name.removeprefix("embedctl-") in SHIPPED_CLASSES


@pytest.mark.parametrize("name", list(DEPLOYMENTS))
def test_probes_and_prometheus_ask_where_it_listens(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    args = container(name)["args"]
    text = args[args.index("--address") + 1] if "--address" in args else settings.metrics_address
    host, port = address_of(text, "metrics_address")
    assert host == "0.0.0.0"
    assert container(name)["ports"] == [{"name": "metrics", "containerPort": port}]
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container(name)[probe]["httpGet"] == {"path": path, "port": "metrics"}
    annotations = DEPLOYMENTS[name]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}


@pytest.mark.parametrize("name", list(DEPLOYMENTS))
def test_a_container_has_the_password_of_its_own_user_only(name: str) -> None:
    user = "monitor" if name == "embedctl-metrics" else "worker"
    variables = {each["name"]: each["value"] for each in container(name)["env"]}
    assert variables["EMBEDCTL_REDIS_URL"].startswith(f"rediss://{user}@")
    mounts = {each["name"]: Path(each["mountPath"]) for each in container(name)["volumeMounts"]}
    assert Path(variables["EMBEDCTL_REDIS_PASSWORD_FILE"]) == mounts["password"] / user
    secrets = [each["secret"]["secretName"] for each in pod(name)["volumes"] if "secret" in each]
    assert secrets == [f"embedctl-{user}"]
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"create secret generic embedctl-{user} --from-file={user}=secrets/{user} --from-file=ca.crt" in page
    assert mounts.keys() == {each["name"] for each in pod(name)["volumes"]}


@pytest.mark.parametrize("name", list(DEPLOYMENTS))
def test_a_container_may_do_nothing_but_its_work(name: str) -> None:
    assert not pod(name)["automountServiceAccountToken"]
    assert not pod(name)["enableServiceLinks"]
    assert pod(name)["securityContext"]["runAsNonRoot"]
    own = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container(name)["securityContext"] == own


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_s_cache_is_a_folder_that_its_own_user_made(name: str) -> None:
    """The top of a volume is root's and open to all; tests/containers run a worker on such a volume."""
    (first,) = pod(name)["initContainers"]
    assert (first["image"], first["securityContext"]) == (container(name)["image"], container(name)["securityContext"])
    (made,) = first["volumeMounts"]
    (cache,) = [each for each in container(name)["volumeMounts"] if each["name"] == made["name"] == "cache"]
    assert first["command"] == ["mkdir", "--parents", "--mode=755", f"{made['mountPath']}/{cache['subPath']}"]
    assert cache["mountPath"] == "/var/cache/embedctl"


@pytest.mark.parametrize("name", WORKERS)
def test_a_drain_of_nodes_leaves_workers(name: str) -> None:
    budget = of_kind("PodDisruptionBudget")[name]["spec"]
    assert budget["maxUnavailable"] == "25%"
    labels = DEPLOYMENTS[name]["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"] == DEPLOYMENTS[name]["spec"]["selector"]["matchLabels"] == labels

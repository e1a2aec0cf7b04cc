"""docker-compose.yml and the Dockerfiles: what they must say, whatever else they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedctl_config import __version__
from embedctl_config.hardware import SHIPPED_CLASSES
from embedctl_config.loading import load_settings
from tests.support.containers import COMPOSE, DOCKERFILES, ROOT, Dockerfile, compose, in_context, variables_of

FILE = compose()
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
#: Those that go on until they are stopped.
LASTING = {name: service for name, service in SERVICES.items() if "tools" not in service.get("profiles", [])}
WORKERS = {name: service for name, service in SERVICES.items() if (service.get("command") or [""])[0] == "up"}
BUILT = {name: service for name, service in SERVICES.items() if "build" in service}
IMAGES = {path.name if path.parent.name == "workers" else "producer": Dockerfile(path) for path in DOCKERFILES}
PROFILES = sorted({profile for service in SERVICES.values() for profile in service.get("profiles", [])})
PAGE = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
YAML_BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
USER = "10001"


def test_every_hardware_class_has_a_service_and_only_cpu_is_on_by_default() -> None:
    assert set(WORKERS) == set(SHIPPED_CLASSES)
    for name, service in WORKERS.items():
        assert service["command"] == ["up", "--class", name]
        assert service.get("profiles", []) == ([] if name == "cpu" else [name])
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["redis", "cpu", "flower"]


def test_a_service_may_do_only_what_it_needs() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "pid", "ipc"} & set(service), name
        assert service.get("network_mode") in (None, "none"), name
        assert service["ulimits"]["core"] == 0, name
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            written = target in ("/data", "/var/cache/embedctl", "/var/lib/embedctl", "/secrets")
            assert mode == ([] if written else ["ro"]), volume
            assert "docker.sock" not in source
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert ("outside" in service.get("networks", [])) == ("ports" in service), name
    for network in ("workers", "clients"):
        told = FILE["networks"][network]
        assert told == {"internal": True, "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"}}
    assert all(service["networks"] == ["workers"] for service in WORKERS.values()), "workers have no way out"
    assert {name for name, each in SERVICES.items() if "workers" in each.get("networks", [])} == {"redis", *WORKERS}


@pytest.mark.parametrize("name", LASTING)
def test_a_service_that_lasts_is_restarted_drained_and_looked_after(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert int(service["logging"]["options"]["max-file"]) > 0
    image = Dockerfile(ROOT / service["build"]["dockerfile"]) if "build" in service else None
    assert "healthcheck" in service or (image and image.health_check)
    if name in WORKERS:
        assert service["stop_grace_period"] == "2m"
        assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_secrets_come_from_files_alone() -> None:
    for name, service in SERVICES.items():
        told = [*service.get("command", []), *service.get("build", {}).get("args", {}).values()]
        for variable, value in service.get("environment", {}).items():
            told.append(str(value))
            secret = re.search("PASSWORD|SECRET|TOKEN|AUTH", variable)
            assert not secret or (variable.endswith("_FILE") and value.startswith("/run/secrets/")), (
                f"{name} {variable}"
            )
        assert not any(re.search(r"://[^/@]*:[^/@]*@", str(word)) for word in told), name
        for word in (*told, *service.get("healthcheck", {}).get("test", [])):
            for mounted in re.findall(r"/run/secrets/([\w-]+)", str(word)):
                assert mounted in service["secrets"]
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"/secrets/", ".env"} <= set(ignored)
    assert not in_context("secrets/redis-acl")


def test_every_redis_user_has_its_own_password_and_nobody_another_s() -> None:
    for name, service in SERVICES.items():
        environment = service.get("environment", {})
        if url := environment.get("EMBEDCTL_REDIS_URL"):
            user = re.fullmatch(r"redis://(\w+)@redis:6379/0", url)
            assert user
            assert environment["EMBEDCTL_REDIS_PASSWORD_FILE"] == f"/run/secrets/redis-{user[1]}"
            mounted = {secret for secret in service["secrets"] if secret.startswith("redis-")}
            assert mounted == {f"redis-{user[1]}"}, name


@pytest.mark.parametrize("name", BUILT)
def test_images_are_built_here_and_never_taken_from_a_registry(name: str) -> None:
    service = SERVICES[name]
    assert service["pull_policy"] == "never"
    assert service["image"].endswith(f":{__version__}")
    assert service["build"]["args"]["VERSION"] == __version__
    dockerfile = Dockerfile(ROOT / service["build"]["dockerfile"])
    declared = {rest.partition("=")[0] for stage in dockerfile.stages for rest in stage.all("ARG")}
    assert set(service["build"]["args"]) <= declared | set(dockerfile.arguments)


def test_the_settings_in_the_containers_are_settings() -> None:
    file = ROOT / "config" / "containers.toml"
    for service in BUILT.values():
        image = Dockerfile(ROOT / service["build"]["dockerfile"])
        declared = {**image.environment, **service.get("environment", {})}
        own = {name: value for name, value in declared.items() if name.startswith("EMBEDCTL_")}
        if "EMBEDCTL_CONFIG" in own:
            own["EMBEDCTL_CONFIG"] = str(file)
        load_settings(own, directory=ROOT / "tests")
    assert tomllib.loads(file.read_text())["metrics_address"]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_built_in_stages_pinned_and_run_as_nobody_in_particular(name: str) -> None:
    dockerfile = IMAGES[name]
    stages = {stage.name for stage in dockerfile.stages}
    assert len(dockerfile.stages) >= 2
    for stage in dockerfile.stages:
        if stage.base in stages:
            continue
        argument = re.fullmatch(r"\$\{(\w+)\}", stage.base)
        assert argument
        base = dockerfile.arguments[argument[1]]
        # A vendor's image without a default must be named by the person who builds.
        assert re.fullmatch(r"[a-z]+:\d+\.\d+-[a-z-]+", base) or argument[1] == "NEURON_BASE"
    image = dockerfile.image
    assert image.last("USER") == f"{USER}:{USER}"
    assert f"useradd --uid {USER} --gid {USER}" in " ".join(image.all("RUN"))
    assert image.last("STOPSIGNAL") == "SIGTERM"
    assert image.last("ENTRYPOINT") == '["embedctl"]'
    assert image.all("LABEL")
    if name == "producer":
        assert image.last("HEALTHCHECK") == "NONE"
    else:
        assert dockerfile.health_check == ["embedctl", "worker", "--ready"]
        assert dockerfile.environment["HF_HUB_OFFLINE"] == "1"
    for stage in dockerfile.stages:
        assert not stage.all("ADD")
        for copied in stage.all("COPY"):
            *sources, _ = copied.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages
            else:
                assert all((ROOT / source).exists() and in_context(source.rstrip("/")) for source in sources)


def test_every_variable_and_every_profile_stands_in_the_page() -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    assert "$" not in re.sub(r"\$\{\w+:-[^}]*\}|\$\$", "", text), "a variable without a default"
    for name in variables_of(text):
        assert f"| `{name}` |" in PAGE
    for profile in PROFILES:
        assert f"`{profile}`" in PAGE


def test_compose_itself_accepts_the_file_alone_and_with_those_of_the_page(tmp_path: Path) -> None:
    engine = shutil.which("docker-compose")
    if engine is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs docker-compose (Debian's package docker-compose)")
    overrides = []
    for number, block in enumerate(block for block in YAML_BLOCKS if block.startswith("services:")):
        override = tmp_path / f"docker-compose.override-{number}.yml"
        override.write_text(block)
        overrides += ["--file", str(override)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for options in ([], overrides):
        command = [engine, "--file", str(COMPOSE), *options, "config"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        accepted = yaml.safe_load(done.stdout)["services"]
        # This version of it shows every service, whatever the profiles.
        assert set(accepted) == set(SERVICES)
        if not options:
            for name, service in SERVICES.items():
                for key in ("command", "entrypoint", "environment", "profiles", "image", "user"):
                    assert accepted[name].get(key) == service.get(key), f"{name} {key}, which the tests read otherwise"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_linter_has_nothing_to_say(path: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "--no-color", path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")

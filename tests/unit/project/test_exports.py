"""What `import embedctl` offers, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import embedctl

HEAVY = ("torch", "transformers", "sentence_transformers", "onnxruntime", "pyarrow", "tokenizers", "tensorrt")


def loaded_by(module: str, *suspects: str) -> list[str]:
    code = f"import sys, {module}; print(*[name for name in {suspects!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_all_is_sorted_and_holds_each_name_once() -> None:
    assert embedctl.__all__ == sorted(set(embedctl.__all__))


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in embedctl.__all__:
        value = getattr(embedctl, name)
        if inspect.isclass(value) or callable(value):
            doc = inspect.getdoc(value) or ""
            assert len(doc) > 15, name
            assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"


def test_every_public_method_of_an_exported_class_is_documented() -> None:
    for name in embedctl.__all__:
        value = getattr(embedctl, name)
        if inspect.isclass(value) and value.__module__.startswith("embedctl"):
            members = [member for member in vars(value) if not member.startswith("_")]
            for member in members:
                found = inspect.getattr_static(value, member)
                if inspect.isfunction(found) or isinstance(found, property | classmethod):
                    assert inspect.getdoc(found), f"{name}.{member}"


def test_nothing_public_is_left_out_of_all() -> None:
    public = {
        name
        for name, value in vars(embedctl).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public - set(embedctl.__all__) == set()


@pytest.mark.parametrize("module", ["embedctl", "embedctl.cli", "embedctl_workers.commands.worker"])
def test_importing_loads_no_model_runtime(module: str) -> None:
    assert loaded_by(module, *HEAVY) == []


@pytest.mark.parametrize(
    "module",
    [
        "embedctl_config",
        "embedctl_config.settings",
        "embedctl_config.loading",
        "embedctl_config.keys",
        "embedctl_config.wire",
        "embedctl_config.errors",
        "embedctl_config.hardware",
        "embedctl_config.fingerprint",
    ],
)
def test_the_configuration_is_plain_python(module: str) -> None:
    assert loaded_by(module, "celery", "kombu", "redis", "numpy", "embedctl", "embedctl_workers") == []


def test_the_monitor_loads_neither_a_model_runtime_nor_celery() -> None:
    assert loaded_by("embedctl.monitoring.serve", *HEAVY, "celery", "kombu", "embedctl_workers") == []


def test_the_producer_never_imports_the_workers() -> None:
    assert loaded_by("embedctl.cli", "embedctl_workers") == []


def test_the_version_is_a_version() -> None:
    assert embedctl.__version__.split(".")[0].isdigit()

"""What `import embedctl` offers, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import embedctl

HEAVY = ("torch", "transformers", "sentence_transformers", "onnxruntime", "pyarrow", "tokenizers", "tensorrt")
CONFIGURATION = ", ".join(
    f"embedctl_config.{name}" for name in ("settings", "loading", "keys", "wire", "errors", "hardware", "fingerprint")
)


def test_all_is_sorted_and_every_name_and_public_method_is_documented() -> None:
    assert embedctl.__all__ == sorted(set(embedctl.__all__))
    for name in embedctl.__all__:
        value = getattr(embedctl, name)
        if callable(value):
            doc = inspect.getdoc(value) or ""
            assert len(doc) > 15, name
            assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"
        if inspect.isclass(value) and value.__module__.startswith("embedctl"):
            for member in (member for member in vars(value) if not member.startswith("_")):
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


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (f"embedctl_config, {CONFIGURATION}", ("celery", "kombu", "redis", "numpy", "embedctl", "embedctl_workers")),
        ("embedctl.operating.monitoring.serve", (*HEAVY, "celery", "kombu", "embedctl_workers")),
        ("embedctl.cli", (*HEAVY, "orjson", "embedctl_workers", "numpy", "redis", "rich")),
        ("embedctl.cli.corpora", (*HEAVY, "orjson", "embedctl_workers")),
        ("embedctl_gateway.serving.serve", (*HEAVY, "embedctl_workers")),
        ("embedctl_workers.commands.worker", HEAVY),
    ],
    ids=["configuration", "monitor", "command line", "corpora", "gateway", "worker"],
)
def test_who_imports_a_module_loads_no_more_than_it_needs(module: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*[name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []

"""Every system that is measured, and the settings that each may choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from embedctl_bench.peers.adapters.embedctl_adapters.serving import Setting

#: Everything is compared with this one, and its vectors, a text at a time, are the reference.
BASELINE = "st-torch"
FLOOR = "floor"
ENGINE, PIPELINE = "embedctl", "embedctl-pipeline"


@dataclass(frozen=True, slots=True)
class System:
    """A system.

    Attributes:
        module: the adapter in this package.
        settings: what it may choose from; those that load alike stand together, so that it loads once for them.
        packages: whose versions matter.
        environment: a requirements file in this folder; our own environment where empty.
        form: the format that the model is converted to.
        ours: whether it is embedctl: it takes texts in chunks of a size that we choose, and has a cache.
        fixed: options to load, whatever the setting.
    """

    name: str
    module: str
    settings: tuple[Setting, ...]
    packages: tuple[str, ...]
    environment: str = ""
    form: str = ""
    precision: str = "fp32"
    ours: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


def _settings(name: str, values: tuple[int, ...], split: tuple[int, ...], **load: object) -> tuple[Setting, ...]:
    """One process with each value of an option; then two processes, which need not fit as much at once."""
    return (
        *(Setting(1, load, {name: value}) for value in values),
        *(Setting(2, load, {name: value}) for value in split),
    )


def _sentence_transformers(backend: str, **load: object) -> tuple[Setting, ...]:
    return _settings("batch", (8, 16, 32, 64), (16, 32), backend=backend, **load)


def _ctranslate2(compute: str) -> tuple[Setting, ...]:
    one, two = Setting(1, {"compute": compute, "workers": 1}), Setting(1, {"compute": compute, "workers": 2})
    return tuple(
        Setting(each.processes, each.load, {"budget": budget})
        for each, budgets in [
            (one, (1024, 2048, 4096)),
            (two, (512, 1024, 2048)),
            (Setting(2, one.load), (512, 1024, 2048)),
        ]
        for budget in budgets
    )


_ST = ("sentence-transformers", "transformers", "torch")
OURS = ("embedctl", "torch", "sentence-transformers", "tokenizers", "numpy")
PRODUCT = (*OURS, "celery", "kombu", "redis")

SYSTEMS = {
    system.name: system
    for system in (
        System(
            FLOOR,
            "floor",
            tuple(
                Setting(processes, {"product": product, "budget": budget})
                for processes in (1, 2)
                for product in ("mm", "prepacked")
                for budget in (1024, 4096)
            ),
            ("torch",),
        ),
        System(BASELINE, "sentence_transformers", _sentence_transformers("torch"), _ST, "st-torch"),
        System(
            "st-onnx",
            "sentence_transformers",
            _sentence_transformers("onnx", file="model.onnx")
            + _settings("batch", (16, 32), (16,), backend="onnx", file="model_O2.onnx"),
            (*_ST, "optimum-onnx", "onnxruntime"),
            "st-onnx",
            "onnx",
        ),
        System(
            "st-openvino",
            "sentence_transformers",
            _sentence_transformers("openvino"),
            (*_ST, "optimum-intel", "openvino"),
            "st-openvino",
            "openvino",
        ),
        System(
            "fastembed",
            "fastembed",
            (
                Setting(1, {}, {"batch": 256, "sort": False}),  # its defaults
                *(Setting(1, {}, {"batch": batch, "sort": True}) for batch in (8, 16, 32, 64)),
                *(Setting(2, {}, {"batch": batch, "sort": True}) for batch in (16, 32)),
            ),
            ("fastembed", "onnxruntime"),
            "fastembed",
            "onnx",
        ),
        System(
            "infinity",
            "infinity",
            tuple(Setting(processes, {"batch": batch}) for processes, batch in ((1, 16), (1, 32), (1, 64), (2, 32))),
            ("infinity_emb", *_ST),
            "infinity",
        ),
        System(
            "ctranslate2",
            "ctranslate2",
            _ctranslate2("float32"),
            ("ctranslate2", "tokenizers"),
            "ctranslate2",
            "ctranslate2",
        ),
        System(ENGINE, "embedctl", (Setting(1), Setting(2)), OURS, ours=True),
        System(
            PIPELINE,
            "embedctl_pipeline",
            (Setting(1, {"workers": 1}), Setting(1, {"workers": 2})),
            PRODUCT,
            ours=True,
        ),
        System(
            "st-onnx-int8",
            "sentence_transformers",
            _sentence_transformers("onnx", file="model_qint8.onnx"),
            (*_ST, "optimum-onnx", "onnxruntime"),
            "st-onnx",
            "onnx",
            "int8",
        ),
        System(
            "ctranslate2-int8",
            "ctranslate2",
            _ctranslate2("int8"),
            ("ctranslate2", "tokenizers"),
            "ctranslate2",
            "ctranslate2",
            "int8",
        ),
        System(
            "embedctl-int8",
            "embedctl",
            (Setting(1, {"hardware": "cpu-int8"}), Setting(2, {"hardware": "cpu-int8"})),
            OURS,
            precision="int8",
            ours=True,
        ),
    )
}
#: Those of others that can take requests.
PEERS = tuple(name for name, system in SYSTEMS.items() if system.environment)

"""Every system that a benchmark measures, and the settings that each may choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from embedctl_bench.peers.adapters.embedctl_adapters.serving import Setting
from embedctl_bench.peers.environments import is_installed
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.models.cache import cache_folder

#: The peer that ratios refer to.
BASELINE = "st-torch"
#: The precision of a system that chooses it by the CPU: what it promises is known when it has been loaded.
AT_ITS_DEFAULT = "default"
#: A class that can be measured without being configured.
_ONNX_FP32 = HardwareClass(backend="onnx")
#: Numbers of workers that may share the CPUs.
_WORKERS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class System:
    """A system: a hardware class of ours, another library, or a limit to compare with. Its name identifies it.

    Attributes:
        label: the name for people.
        adapter: module and class in the package of adapters, as `module:Class`.
        runner: what a :class:`~embedctl_bench.measuring.sampled.SampledProcess` loads in our own environment: a key of
            :mod:`embedctl_bench.measuring.runners`. A peer has none, because its adapter is used.
        hardware: the hardware class, if it is one of ours.
        settings: the settings to choose from; those that load alike stand together, so that it loads once for them.
        packages: packages whose versions matter.
        environment: the name of its requirements file in this folder; empty for our own environment.
        precision: what it promises: a precision of hardware classes, or :data:`AT_ITS_DEFAULT`.
        form: the format that its model is converted to; empty for the model's own.
        ours: whether it is embedctl: it takes texts in chunks of a given size, and has a cache.
        fixed: options for loading that are the same in every setting.
    """

    name: str
    label: str = field(default="", compare=False)
    adapter: str = field(default="", compare=False)
    settings: tuple[Setting, ...] = field(default=(), compare=False)
    packages: tuple[str, ...] = field(default=(), compare=False)
    environment: str = field(default="", compare=False)
    form: str = field(default="", compare=False)
    precision: str = field(default="fp32", compare=False)
    runner: str = field(default="", compare=False)
    hardware: str = field(default="", compare=False)
    ours: bool = field(default=False, compare=False)
    fixed: Mapping[str, Any] = field(default_factory=dict, compare=False)


def _settings(name: str, values: tuple[int, ...], split: tuple[int, ...], **load: object) -> tuple[Setting, ...]:
    """One process with each value of an option, then two processes with values that need less memory each."""
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
_ST_ADAPTER = "sentence_transformers:SentenceTransformersAdapter"
_CTRANSLATE2_ADAPTER = "ctranslate2:CTranslate2Adapter"
_ENGINE = ("embedctl", "torch", "sentence-transformers", "tokenizers", "numpy")
_PRODUCT = (*_ENGINE, "celery", "kombu", "redis")


def _floor(name: str, label: str, precision: str, kind: str) -> System:
    return System(
        name,
        label,
        "floor:FloorAdapter",
        tuple(
            Setting(processes, {"product": product, "budget": budget})
            for processes in (1, 2)
            for product in ("prepacked", "mm")
            for budget in (1024, 4096)
        ),
        ("torch",),
        precision=precision,
        runner="floor",
        fixed={"kind": kind},
    )


#: In our own environment: a model's matrix products alone, and other libraries that embedctl installs.
FLOOR = _floor("floor", "floor", "fp32", "fp32")
#: The floor of each precision.
FLOORS = {
    "fp32": FLOOR,
    "fp16": _floor("floor-bf16", "floor, bf16", "fp16", "bf16"),
    "int8": _floor("floor-int8", "floor, int8", "int8", "int8"),
}
TRANSFORMERS = System("transformers", "transformers", runner="transformers")
SENTENCE_TRANSFORMERS = System(
    "sentence-transformers",
    "sentence-transformers, torch",
    _ST_ADAPTER,
    _sentence_transformers("torch"),
    _ST,
    runner="sentence-transformers",
)
SENTENCE_TRANSFORMERS_BF16 = System(
    "sentence-transformers-bf16",
    "sentence-transformers, torch bf16",
    _ST_ADAPTER,
    _sentence_transformers("torch", dtype="bfloat16"),
    _ST,
    precision="fp16",
)
#: Other systems, each in an environment of its own, by name.
PEERS = {
    system.name: system
    for system in (
        System(BASELINE, "sentence-transformers, torch", _ST_ADAPTER, _sentence_transformers("torch"), _ST, "st-torch"),
        System(
            "st-onnx",
            "sentence-transformers, onnxruntime",
            _ST_ADAPTER,
            _sentence_transformers("onnx", file="model.onnx")
            + _settings("batch", (16, 32), (16,), backend="onnx", file="model_O2.onnx"),
            (*_ST, "optimum-onnx", "onnxruntime"),
            "st-onnx",
            "onnx",
        ),
        System(
            "st-openvino",
            "sentence-transformers, OpenVINO",
            _ST_ADAPTER,
            _sentence_transformers("openvino"),
            (*_ST, "optimum-intel", "openvino"),
            "st-openvino",
            "openvino",
        ),
        System(
            "fastembed",
            "fastembed",
            "fastembed:FastembedAdapter",
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
            "infinity, torch",
            "infinity:InfinityAdapter",
            tuple(Setting(processes, {"batch": batch}) for processes, batch in ((1, 16), (1, 32), (1, 64), (2, 32))),
            ("infinity_emb", *_ST),
            "infinity",
        ),
        System(
            "ctranslate2",
            "CTranslate2, our wrapper",
            _CTRANSLATE2_ADAPTER,
            _ctranslate2("float32"),
            ("ctranslate2", "tokenizers"),
            "ctranslate2",
            "ctranslate2",
        ),
        System(
            "st-torch-bf16",
            SENTENCE_TRANSFORMERS_BF16.label,
            _ST_ADAPTER,
            SENTENCE_TRANSFORMERS_BF16.settings,
            _ST,
            "st-torch",
            precision="fp16",
        ),
        System(
            "st-openvino-default",
            "sentence-transformers, OpenVINO at its default",
            _ST_ADAPTER,
            _sentence_transformers("openvino", hint=""),
            (*_ST, "optimum-intel", "openvino"),
            "st-openvino",
            "openvino",
            AT_ITS_DEFAULT,
        ),
        System(
            "ctranslate2-bf16",
            "CTranslate2 bf16, our wrapper",
            _CTRANSLATE2_ADAPTER,
            _ctranslate2("bfloat16"),
            ("ctranslate2", "tokenizers"),
            "ctranslate2",
            "ctranslate2",
            "fp16",
        ),
        System(
            "st-onnx-int8",
            "sentence-transformers, onnxruntime int8",
            _ST_ADAPTER,
            _sentence_transformers("onnx", file="model_qint8.onnx"),
            (*_ST, "optimum-onnx", "onnxruntime"),
            "st-onnx",
            "onnx",
            "int8",
        ),
        System(
            "ctranslate2-int8",
            "CTranslate2 int8, our wrapper",
            _CTRANSLATE2_ADAPTER,
            _ctranslate2("int8"),
            ("ctranslate2", "tokenizers"),
            "ctranslate2",
            "ctranslate2",
            "int8",
        ),
    )
}


def choose_peers(asked: tuple[str, ...] | None, place: Path) -> tuple[list[System], list[str]]:
    """The peers to measure, and the names of those that are left out because they are not installed.

    Args:
        asked: names; `("all",)` for all of them, None for those that are installed.
        place: the folder of environments.

    Raises:
        SettingsError: there is no such peer.
    """
    if asked is None:
        found = [system for system in PEERS.values() if is_installed(system.environment, place)]
        return found, [name for name, system in PEERS.items() if system not in found]
    if asked == ("all",):
        return list(PEERS.values()), []
    if unknown := [name for name in asked if name not in PEERS]:
        raise SettingsError(f"--peers: there is no {', '.join(unknown)}. Known: {', '.join(PEERS)}; or all, or none")
    return [PEERS[name] for name in asked], []


def baselines_for(ours: Sequence[System], peers: Sequence[System]) -> list[System]:
    """sentence-transformers of our own environment, unless it is among the peers: in fp32; in bf16 beside 16 bits."""
    names = {peer.name for peer in peers}
    found = [] if BASELINE in names else [SENTENCE_TRANSFORMERS]
    if f"{BASELINE}-bf16" not in names and any(system.precision == "fp16" for system in ours):
        found.append(SENTENCE_TRANSFORMERS_BF16)
    return found


def backend_of(hardware: str) -> System:
    """A hardware class's backend, called by the steps of a worker."""
    name = f"embedctl {hardware}"
    return System(name, name, runner="class", hardware=hardware, ours=True)


def engine_of(hardware: str, settings: Settings) -> System:
    """A worker's engine with a hardware class, called directly.

    Raises:
        SettingsError: there is no such class.
    """
    found = _ours("embedctl-engine", hardware, settings, _ENGINE)
    return System(
        **found, label=f"embedctl's engine, class {hardware}", adapter="embedctl:EngineAdapter",
        settings=(Setting(1), Setting(2)),
    )  # fmt: skip


def product_of(hardware: str, settings: Settings, cpus: int, workers: Sequence[int] = _WORKERS) -> System:
    """Our whole product with a hardware class: a Redis, and workers that share the CPUs evenly.

    Args:
        workers: the numbers of workers to choose from; an accelerator has one worker.

    Raises:
        SettingsError: there is no such class.
    """
    found = _ours("embedctl", hardware, settings, _PRODUCT)
    shares = [count for count in workers if cpus % count == 0]
    counts = shares if class_entry(hardware, settings).device == "cpu" else [1]
    return System(
        **found, label=f"embedctl, class {hardware}", adapter="embedctl_pipeline:ProductAdapter",
        settings=tuple(Setting(1, {"workers": count}) for count in counts),
    )  # fmt: skip


def class_entry(hardware: str, settings: Settings) -> HardwareClass:
    """A class's entry; `onnx` has one even where it is not configured.

    Raises:
        SettingsError: there is no such class.
    """
    if hardware == "onnx" and "onnx" not in settings.classes:
        return _ONNX_FP32
    return settings.hardware_class(hardware)


def _ours(name: str, hardware: str, settings: Settings, packages: tuple[str, ...]) -> dict[str, Any]:
    """The facts that our systems of a class share."""
    entry = settings.hardware_class(hardware)
    return {
        "name": f"{name}-{hardware}",
        "packages": (*packages, "onnxruntime") if entry.backend.startswith("onnx") else packages,
        "precision": entry.precision,
        "hardware": hardware,
        "ours": True,
        "fixed": {"cache": str(cache_folder(settings)), "hardware": hardware, "entry": asdict(entry)},
    }

"""Every system that a benchmark measures, and the settings that each may choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from embedctl_bench.peers.adapters.embedctl_adapters.serving import Setting
from embedctl_bench.peers.environments import is_installed
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from embedctl_workers.models.cache import cache_folder

#: The peer that ratios refer to.
BASELINE = "st-torch"
#: The precision of a system that chooses it by the CPU: what it promises is known when it has been loaded.
AT_ITS_DEFAULT = "default"
#: Numbers of workers that may share the CPUs.
_WORKERS = (1, 2, 4, 8)
_GPU_BATCHES = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class System:
    """A system: a hardware class of ours, another library, or a limit to compare with. Its name identifies it.

    Attributes:
        label: the name for people.
        adapter: module and class in the package of adapters, as `module:Class`.
        settings: the settings to choose from; those that load alike stand together, so that it loads once for them.
        packages: packages whose versions matter.
        environment: the name of its requirements file in this folder; empty for our own environment.
        precision: what it promises: a precision of hardware classes, or :data:`AT_ITS_DEFAULT`.
        form: the format that its model is converted to; empty for the model's own.
        floor: whether it is a floor: products alone, which make no vectors.
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
    ours: bool = field(default=False, compare=False)
    floor: bool = field(default=False, compare=False)
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
_OURS = ("embedctl", "torch", "sentence-transformers", "tokenizers", "numpy", "celery", "kombu", "redis", "uvicorn")


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
        floor=True,
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
#: The device's products in its best precision, attention included, as `embedctl model verify` measures them.
GPU_FLOOR = System(
    "floor-gpu",
    "floor",
    "floor:MatrixAdapter",
    (Setting(),),
    ("torch",),
    precision="fp16",
    floor=True,
    fixed={"hardware": "gpu"},
)
TRANSFORMERS = System(
    "transformers", "transformers", "transformers:TransformersAdapter", (Setting(),), ("transformers", "torch")
)
SENTENCE_TRANSFORMERS = System(
    "sentence-transformers", "sentence-transformers, torch", _ST_ADAPTER, _sentence_transformers("torch"), _ST
)
SENTENCE_TRANSFORMERS_BF16 = System(
    "sentence-transformers-bf16",
    "sentence-transformers, torch bf16",
    _ST_ADAPTER,
    _sentence_transformers("torch", dtype="bfloat16"),
    _ST,
    precision="fp16",
)


def _peer(
    name: str,
    label: str,
    settings: tuple[Setting, ...],
    packages: tuple[str, ...] = (),
    form: str = "",
    precision: str = "fp32",
    *,
    adapter: str = _ST_ADAPTER,
    environment: str = "",
) -> System:
    return System(name, label, adapter, settings, packages, environment or name, form, precision)


_ST_ONNX, _ST_OPENVINO = (*_ST, "optimum-onnx", "onnxruntime"), (*_ST, "optimum-intel", "openvino")
_FASTEMBED = (
    Setting(1, {}, {"batch": 256, "sort": False}),  # its defaults
    *_settings("batch", (8, 16, 32, 64), (16, 32)),
)


def _of_ctranslate2(suffix: str, compute: str, precision: str) -> System:
    return _peer(
        f"ctranslate2{suffix.replace(' ', '-')}",
        f"CTranslate2{suffix}, our wrapper",
        _ctranslate2(compute),
        ("ctranslate2", "tokenizers"),
        "ctranslate2",
        precision,
        adapter="ctranslate2:CTranslate2Adapter",
        environment="ctranslate2",
    )


#: Other systems, each in an environment of its own, by name.
PEERS = {
    system.name: system
    for system in (
        _peer(BASELINE, "sentence-transformers, torch", _sentence_transformers("torch"), _ST),
        _peer(
            "st-onnx",
            "sentence-transformers, onnxruntime",
            _sentence_transformers("onnx", file="model.onnx")
            + _settings("batch", (16, 32), (16,), backend="onnx", file="model_O2.onnx"),
            _ST_ONNX,
            "onnx",
        ),
        _peer(
            "st-openvino",
            "sentence-transformers, OpenVINO",
            _sentence_transformers("openvino"),
            _ST_OPENVINO,
            "openvino",
        ),
        _peer(
            "fastembed",
            "fastembed",
            tuple(replace(each, encode={"sort": True, **each.encode}) for each in _FASTEMBED),
            ("fastembed", "onnxruntime"),
            "onnx",
            adapter="fastembed:FastembedAdapter",
        ),
        _peer(
            "infinity",
            "infinity, torch",
            tuple(Setting(processes, {"batch": batch}) for processes, batch in ((1, 16), (1, 32), (1, 64), (2, 32))),
            ("infinity_emb", *_ST),
            adapter="infinity:InfinityAdapter",
        ),
        _of_ctranslate2("", "float32", "fp32"),
        _peer(
            "st-torch-bf16",
            SENTENCE_TRANSFORMERS_BF16.label,
            SENTENCE_TRANSFORMERS_BF16.settings,
            _ST,
            precision="fp16",
            environment=BASELINE,
        ),
        _peer(
            "st-openvino-default",
            "sentence-transformers, OpenVINO at its default",
            _sentence_transformers("openvino", hint=""),
            _ST_OPENVINO,
            "openvino",
            AT_ITS_DEFAULT,
            environment="st-openvino",
        ),
        _of_ctranslate2(" bf16", "bfloat16", "fp16"),
        _peer(
            "st-onnx-int8",
            "sentence-transformers, onnxruntime int8",
            _sentence_transformers("onnx", file="model_qint8.onnx"),
            _ST_ONNX,
            "onnx",
            "int8",
            environment="st-onnx",
        ),
        _of_ctranslate2(" int8", "int8", "int8"),
    )
}
#: infinity's server, at its defaults.
INFINITY_SERVER = _peer(
    "infinity-server",
    "infinity's server, torch",
    (Setting(),),
    ("infinity_emb", *_ST, "fastapi", "uvicorn"),
    adapter="http_infinity:InfinityServerAdapter",
)


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


def on_gpu(system: System) -> System:
    """sentence-transformers of our own environment on the GPU, at the batch sizes that suit one."""
    (dtype,) = {setting.load.get("dtype", "float32") for setting in system.settings}
    load = {"backend": "torch", "device": "cuda", "dtype": dtype}
    return replace(system, settings=tuple(Setting(1, load, {"batch": batch}) for batch in _GPU_BATCHES))


def engine_of(hardware: str, settings: Settings) -> System:
    """A worker's engine with a hardware class, called directly.

    Raises:
        SettingsError: there is no such class.
    """
    label = f"embedctl's engine, class {hardware}"
    ways = (Setting(1), Setting(2)) if settings.hardware_class(hardware).device == "cpu" else (Setting(1),)
    return _ours("embedctl-engine", label, "embedctl:EngineAdapter", hardware, settings, ways)


def product_of(hardware: str, settings: Settings, cpus: int, workers: Sequence[int] = _WORKERS) -> System:
    """Our whole product with a hardware class: a Redis, and workers that share the CPUs evenly.

    Args:
        workers: the numbers of workers to choose from; an accelerator has one worker.

    Raises:
        SettingsError: there is no such class.
    """
    shares = [count for count in workers if cpus % count == 0]
    counts = shares if settings.hardware_class(hardware).device == "cpu" else [1]
    ways = tuple(Setting(1, {"workers": count}) for count in counts)
    label = f"embedctl, class {hardware}"
    return _ours("embedctl", label, "embedctl_pipeline:ProductAdapter", hardware, settings, ways)


def gateway_of(hardware: str, settings: Settings) -> System:
    """`embedctl gateway` beside a worker of a hardware class.

    Raises:
        SettingsError: there is no such class.
    """
    label = f"embedctl gateway, class {hardware}"
    return _ours("gateway", label, "http_ours:GatewayAdapter", hardware, settings, (Setting(),))


def direct_of(hardware: str, settings: Settings) -> System:
    """A worker's engine in the process of a server.

    Raises:
        SettingsError: there is no such class.
    """
    label = f"the same engine in the server's process, class {hardware}"
    return _ours("direct", label, "http_ours:DirectAdapter", hardware, settings, (Setting(),))


def _ours(name: str, label: str, adapter: str, hardware: str, settings: Settings, ways: tuple[Setting, ...]) -> System:
    entry = settings.hardware_class(hardware)
    return System(
        f"{name}-{hardware}",
        label,
        adapter,
        ways,
        (*_OURS, "onnxruntime") if entry.backend.startswith("onnx") else _OURS,
        precision=entry.precision,
        ours=True,
        fixed={"cache": str(cache_folder(settings)), "hardware": hardware, "entry": asdict(entry)},
    )

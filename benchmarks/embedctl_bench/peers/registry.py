"""Every system that a benchmark measures, and the settings that each may choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

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
_OURS = ("embedctl", "torch", "sentence-transformers", "tokenizers", "numpy", "celery", "kombu", "redis", "uvicorn")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a system: processes that share the CPUs, and options for loading and for encoding."""

    processes: int = 1
    load: Mapping[str, Any] = field(default_factory=dict)
    encode: Mapping[str, Any] = field(default_factory=dict)

    def label(self, cpus: int) -> str:
        """Processes × threads, and the options."""
        options = [f"{name} {value}" for name, value in {**self.load, **self.encode}.items()]
        return ", ".join([f"{self.processes}×{cpus // self.processes}", *options])


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """A system: a hardware class of ours, another library, or a limit to compare with.

    Attributes:
        adapter: module and class, as `.module:Class` in the package of adapters.
        settings: the settings to choose from; those that load alike stand together, so that it loads once for them.
        precision: what it promises: a precision of hardware classes, or :data:`AT_ITS_DEFAULT`.
        environment: the name of its requirements file in this folder; empty for our own environment.
        form: the format that its model is converted to; empty for the model's own.
        floor: whether it is a floor: products alone, which make no vectors.
        ours: whether it is embedctl: it takes texts in chunks of a given size, and has a cache.
        fixed: options for loading that are the same in every setting.
    """

    name: str
    label: str
    adapter: str
    settings: tuple[Setting, ...]
    packages: tuple[str, ...]
    precision: str = "fp32"
    environment: str = ""
    form: str = ""
    floor: bool = False
    ours: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


def _settings(name: str, values: tuple[int, ...], split: tuple[int, ...], **load: object) -> tuple[Setting, ...]:
    """One process with each value of an option, then two processes with values that need less memory each."""
    choices = [(1, value) for value in values] + [(2, value) for value in split]
    return tuple(Setting(processes, load, {name: value}) for processes, value in choices)


def _sentence_transformers(
    name: str, label: str, packages: tuple[str, ...] = (), precision: str = "fp32", form: str = "", **load: object
) -> System:
    """sentence-transformers on a backend; its environment is named as the system without its precision."""
    return System(
        name,
        f"sentence-transformers, {label}",
        ".sentence_transformers:SentenceTransformersAdapter",
        _settings("batch", (8, 16, 32, 64), (16, 32), **load),
        ("sentence-transformers", "transformers", "torch", *packages),
        precision,
        "-".join(name.split("-")[:2]),
        form,
    )


def _ctranslate2(compute: str, precision: str, suffix: str = "") -> System:
    ways = [(1, 1, (1024, 2048, 4096)), (1, 2, (512, 1024, 2048)), (2, 1, (512, 1024, 2048))]
    return System(
        f"ctranslate2{suffix.replace(' ', '-')}",
        f"CTranslate2{suffix}, our wrapper",
        ".ctranslate2:CTranslate2Adapter",
        tuple(
            Setting(processes, {"compute": compute, "workers": workers}, {"budget": budget})
            for processes, workers, budgets in ways
            for budget in budgets
        ),
        ("ctranslate2", "tokenizers"),
        precision,
        environment="ctranslate2",
        form="ctranslate2",
    )


def _floor(name: str, label: str, precision: str, kind: str) -> System:
    ways = product((1, 2), ("prepacked", "mm"), (1024, 4096))
    settings = tuple(Setting(processes, {"product": way, "budget": budget}) for processes, way, budget in ways)
    return System(name, label, ".floor:FloorAdapter", settings, ("torch",), precision, floor=True, fixed={"kind": kind})


#: In our own environment: a model's matrix products alone, and other libraries that embedctl installs.
FLOOR = _floor("floor", "floor", "fp32", "fp32")
#: The same with attention's products.
ATTENTION_FLOOR = replace(
    FLOOR, name="floor-attention", label="floor with attention", fixed={**FLOOR.fixed, "attention": True}
)
FLOORS = (
    FLOOR,
    ATTENTION_FLOOR,
    _floor("floor-bf16", "floor, bf16", "fp16", "bf16"),
    _floor("floor-int8", "floor, int8", "int8", "int8"),
)
#: The device's products in its best precision, attention included.
GPU_FLOOR = System("floor-gpu", "floor", ".floor:MatrixAdapter", (Setting(),), ("torch",), "fp16", floor=True)
TRANSFORMERS = System(
    "transformers", "transformers", ".transformers:TransformersAdapter", (Setting(),), ("transformers", "torch")
)
_ST_TORCH = _sentence_transformers(BASELINE, "torch", backend="torch")
_ST_TORCH_BF16 = _sentence_transformers(
    f"{BASELINE}-bf16", "torch bf16", precision="fp16", backend="torch", dtype="bfloat16"
)
SENTENCE_TRANSFORMERS = replace(_ST_TORCH, name="sentence-transformers", environment="")
SENTENCE_TRANSFORMERS_BF16 = replace(_ST_TORCH_BF16, name="sentence-transformers-bf16", environment="")

_ONNX, _OPENVINO = ("optimum-onnx", "onnxruntime"), ("optimum-intel", "openvino")
_ST_ONNX = _sentence_transformers("st-onnx", "onnxruntime", _ONNX, form="onnx", backend="onnx", file="model.onnx")
_ST_ONNX_O2 = _settings("batch", (16, 32), (16,), backend="onnx", file="model_O2.onnx")
_INFINITY = ("infinity_emb", *_ST_TORCH.packages)
#: Other systems, each in an environment of its own, by name.
PEERS = {
    system.name: system
    for system in (
        _ST_TORCH,
        replace(_ST_ONNX, settings=_ST_ONNX.settings + _ST_ONNX_O2),
        _sentence_transformers("st-openvino", "OpenVINO", _OPENVINO, form="openvino", backend="openvino"),
        System(
            "fastembed",
            "fastembed",
            ".fastembed:FastembedAdapter",
            (
                Setting(1, {}, {"sort": False, "batch": 256}),  # its defaults
                *(
                    replace(each, encode={"sort": True, **each.encode})
                    for each in _settings("batch", (8, 16, 32, 64), (16, 32))
                ),
            ),
            ("fastembed", "onnxruntime"),
            environment="fastembed",
            form="onnx",
        ),
        System(
            "infinity",
            "infinity, torch",
            ".infinity:InfinityAdapter",
            tuple(Setting(processes, {"batch": batch}) for processes, batch in ((1, 16), (1, 32), (1, 64), (2, 32))),
            _INFINITY,
            environment="infinity",
        ),
        _ctranslate2("float32", "fp32"),
        _ST_TORCH_BF16,
        _sentence_transformers(
            "st-openvino-default",
            "OpenVINO at its default",
            _OPENVINO,
            AT_ITS_DEFAULT,
            form="openvino",
            backend="openvino",
            hint="",
        ),
        _ctranslate2("bfloat16", "fp16", " bf16"),
        _sentence_transformers(
            "st-onnx-int8", "onnxruntime int8", _ONNX, "int8", form="onnx", backend="onnx", file="model_qint8.onnx"
        ),
        _sentence_transformers(
            "st-openvino-int8", "OpenVINO int8", _OPENVINO, "int8", form="openvino-int8", backend="openvino", hint=""
        ),
        _ctranslate2("int8", "int8", " int8"),
    )
}
#: infinity's server, at its defaults.
INFINITY_SERVER = System(
    "infinity-server",
    "infinity's server, torch",
    ".http_client:InfinityServerAdapter",
    (Setting(),),
    (*_INFINITY, "fastapi", "uvicorn"),
    environment="infinity",
)


def choose_peers(asked: tuple[str, ...] | None, place: Path) -> tuple[list[System], list[str]]:
    """The peers to measure, and the names of those that are left out because they are not installed.

    `asked` has names, else SettingsError: `("all",)` for all of them, None for those that are installed.
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
    """A worker's engine with a hardware class, called directly."""
    ways = (Setting(1), Setting(2)) if settings.hardware_class(hardware).device == "cpu" else (Setting(1),)
    system = System("embedctl-engine", "embedctl's engine", ".embedctl:EngineAdapter", ways, _OURS)
    return _with_class(system, hardware, settings)


def product_of(hardware: str, settings: Settings, cpus: int, workers: Sequence[int] = _WORKERS) -> System:
    """Our whole product with a hardware class: a Redis, and workers that share the CPUs evenly, in one of these
    numbers; an accelerator has one worker."""
    shares = [count for count in workers if cpus % count == 0]
    counts = shares if settings.hardware_class(hardware).device == "cpu" else [1]
    ways = tuple(Setting(1, {"workers": count}) for count in counts)
    system = System("embedctl", "embedctl", ".embedctl_pipeline:ProductAdapter", ways, _OURS)
    return _with_class(system, hardware, settings)


def servers_of(hardware: str, settings: Settings) -> list[System]:
    """`embedctl gateway` beside a worker of a hardware class; and the worker's engine in the process of a server."""
    gateway = ("gateway", "embedctl gateway", ".embedctl_pipeline:GatewayAdapter")
    direct = ("direct", "the same engine in the server's process", ".embedctl_pipeline:DirectAdapter")
    return [_with_class(System(*each, (Setting(),), _OURS), hardware, settings) for each in (gateway, direct)]


def _with_class(system: System, hardware: str, settings: Settings) -> System:
    """A system of ours with a hardware class."""
    entry = settings.hardware_class(hardware)
    return replace(
        system,
        name=f"{system.name}-{hardware}",
        label=f"{system.label}, class {hardware}",
        packages=(*_OURS, "onnxruntime") if entry.backend.startswith("onnx") else _OURS,
        precision=entry.precision,
        ours=True,
        fixed={"cache": str(cache_folder(settings)), "hardware": hardware, "entry": asdict(entry)},
    )

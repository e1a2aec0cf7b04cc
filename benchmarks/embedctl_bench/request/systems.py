"""What `embedctl bench request` measures: our product by hardware class, the others, and a process for each of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from embedctl_bench.asking import Asked
from embedctl_bench.measuring.session import Session
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Setting, Vectors
from embedctl_bench.peers.child import Child
from embedctl_bench.peers.environments import HERE, Unavailable, is_installed
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import PEERS, PRODUCT, SYSTEMS, System
from embedctl_bench.peers.workload import Workload
from embedctl_bench.request.results import Result, Run, Shape
from embedctl_bench.request.texts import REQUESTS, request_texts
from embedctl_config.errors import SettingsError
from embedctl_workers.arrays.distance import measure
from embedctl_workers.models.cache import cache_folder

#: Requests to warm up with.
WARM_UP = Shape("quick", "requests of 3 texts", (3,) * REQUESTS)
#: Workers that the CPUs may be shared out among.
_WORKERS = (1, 2, 4, 8)
_LABELS = {
    "st-torch": "sentence-transformers, torch",
    "st-onnx": "sentence-transformers, onnxruntime",
    "st-openvino": "sentence-transformers, OpenVINO",
    "fastembed": "fastembed",
    "infinity": "infinity, torch",
    "ctranslate2": "CTranslate2, our wrapper",
    "st-onnx-int8": "sentence-transformers, onnxruntime int8",
    "ctranslate2-int8": "CTranslate2 int8, our wrapper",
}


def choose_peers(asked: tuple[str, ...] | None, place: Path) -> tuple[list[str], list[str]]:
    """The peers to measure, and those that are left out because they are not installed.

    Raises:
        SettingsError: there is no such peer.
    """
    if asked is None:
        installed = [name for name in PEERS if is_installed(SYSTEMS[name].environment, place)]
        return installed, [name for name in PEERS if name not in installed]
    if asked == ("all",):
        return list(PEERS), []
    if unknown := [name for name in asked if name not in PEERS]:
        raise SettingsError(f"--peers: there is no {', '.join(unknown)}. Known: {', '.join(PEERS)}; or all, or none")
    return list(asked), []


def requirements() -> str:
    """Tells what the peers' environments hold."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HERE.glob("*.txt")))).hexdigest()[:12]


def product(hardware: str, asked: Asked) -> System:
    """Our whole product with a hardware class, as it is configured here."""
    entry = asked.settings.hardware_class(hardware)
    shares = [count for count in _WORKERS if len(asked.cpus) % count == 0]
    return System(
        f"embedctl-{hardware}",
        "embedctl_pipeline",
        tuple(Setting(1, {"workers": count}) for count in (shares if entry.device == "cpu" else [1])),
        (*PRODUCT, "onnxruntime") if entry.backend.startswith("onnx") else PRODUCT,
        precision=entry.precision,
        ours=True,
        fixed={
            "cache": str(cache_folder(asked.settings)),
            "chunk": asked.settings.chunk_size,
            "hardware": hardware,
            "entry": asdict(entry),
        },
    )


def result_of(system: System) -> Result:
    """Where what is measured of a system will stand."""
    if system.ours:
        hardware = system.fixed["hardware"]
        return Result(system.name, f"embedctl, class {hardware}", system.precision, ours=True)
    return Result(system.name, _LABELS[system.name], system.precision, ours=False)


@dataclass(frozen=True, slots=True)
class Ground:
    """What all systems have in common on one model.

    Attributes:
        key: begins the keys of steps: the model.
        workload: the texts that have references, and by which systems choose their settings.
        checked: how many of the first texts of each request those are.
        reference: their vectors.
    """

    key: str
    model: Model
    workload: Workload
    checked: Shape
    reference: Vectors
    cpus: Sequence[int]
    place: Path
    session: Session
    quick: bool

    def requests(self, shape: Shape) -> Path:
        """The file of requests of a shape."""
        texts = [request_texts(number, count) for number, count in enumerate(shape.sizes)]
        return kept(texts, self.place, f"requests-{shape.name}")

    def compare(self, vectors: Vectors, shape: Shape) -> dict[str, float]:
        """How far the vectors of requests of a shape are from their references.

        Raises:
            Unavailable: they are not as many, or not as long.
        """
        if vectors.shape != (shape.texts, self.reference.shape[1]):
            raise Unavailable(f"vectors of shape {vectors.shape} for {shape.texts} texts")
        rows: list[int] = []
        first = 0
        for size, count in zip(shape.sizes, self.checked.sizes, strict=True):
            rows += range(first, first + min(size, count))
            first += size
        found = measure(vectors[rows], self.reference)
        return {
            "max_abs_error": found.max_abs_error,
            "min_cosine": found.min_cosine,
            "mean_cosine": found.mean_cosine,
        }


class Contender:
    """One system on one model: its process, started when it is first needed, and what was measured of it."""

    def __init__(self, system: System, ground: Ground) -> None:
        self.result = result_of(system)
        self._system, self._ground = system, ground
        self._child: Child | None = None

    def choose(self) -> None:
        """Let it choose its setting, unless an earlier run has kept its choice.

        Raises:
            Unavailable: its environment, the model in its format, or the system itself fails.
        """
        # A quick look tries none: the first one has to do.
        settings = self._system.settings[:1] if self._ground.quick else self._system.settings

        def facts() -> dict[str, Any]:
            child = self._start(settings)
            tried = child.tried
            if self._system.ours:
                words = map(self._words, settings)
                tried = [{**each, "setting": setting} for each, setting in zip(tried, words, strict=True)]
            return {"chosen": asdict(child.chosen), "tried": tried, "versions": child.versions}

        found = self._ground.session.step(f"{self._ground.key}/setting/{self.result.name}", facts)
        chosen = Setting(**found["chosen"])
        self._system = replace(self._system, settings=(replace(chosen, fixed={}),))
        self.result.setting = self._words(chosen)
        self.result.tried, self.result.versions = found["tried"], found["versions"]

    def run(self, shape: Shape) -> dict[str, Any]:
        """Make the requests of a shape, all at once.

        Raises:
            Unavailable: it failed.
        """
        child = self._child or self._start(self._system.settings)
        done = child.requests(self._ground.requests(shape))
        found = self._ground.compare(done.vectors, shape)
        return Run(done.seconds, done.fetched, done.tokens, done.latencies, **found).to_json()

    def close(self) -> None:
        """End its process."""
        if self._child:
            self._child.close()
            self._child = None

    def _start(self, settings: tuple[Setting, ...]) -> Child:
        ground = self._ground
        system, each = replace(self._system, settings=settings), ground.checked.texts // REQUESTS
        self._child = Child(system, ground.model, ground.workload, ground.cpus, ground.place, request=each)
        self._child.requests(ground.requests(WARM_UP))
        return self._child

    def _words(self, setting: Setting) -> str:
        cpus = len(self._ground.cpus)
        if not self._system.ours:
            return setting.label(cpus)
        workers = setting.load["workers"]
        return f"{workers} worker{'s' * (workers > 1)} of {cpus // workers} CPU{'s' * (cpus // workers > 1)}"


def kept(texts: Sequence[Any], place: Path, name: str) -> Path:
    """A file with these texts, as JSON."""
    text = json.dumps(texts)
    path = place / "workloads" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    return path

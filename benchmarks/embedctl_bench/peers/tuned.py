"""A system at the fastest of its settings, in a process of its own; and the reference for its vectors."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, nan
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_bench.peers.adapters.embedctl_adapters.serving import Answer, Setting, Vectors
from embedctl_bench.peers.child import ChildProcess
from embedctl_bench.peers.environments import environment_for, python_of
from embedctl_bench.peers.models import Model, converted
from embedctl_bench.peers.registry import SENTENCE_TRANSFORMERS, System
from embedctl_bench.peers.workload import Workload

#: A tuning run encodes this much of the workload: seconds, not minutes, whatever the model.
_SAMPLE_FLOPS = 5e11
_FEWEST_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a system over a load.

    Attributes:
        seconds: from the texts to the last vector; of a load that is sampled, of one request.
        latencies: of the requests (seconds): since all were made, or since this one was.
        idle: the share of time during which the GPU was idle; NaN if that is not known.
    """

    seconds: float
    tokens: int
    latencies: Sequence[float] = ()
    idle: float = nan


@dataclass(frozen=True, slots=True)
class Task:
    """What a system is to encode, and where.

    Attributes:
        workload: the texts; systems choose their settings on a sample of them.
        cpus: it runs on these.
        place: the folder of environments and of everything that is made for them.
    """

    model: Model
    workload: Workload
    cpus: Sequence[int]
    place: Path


class TunedProcess(ChildProcess):
    """A loaded system, which chose its setting by its speed on a sample. Its log is NAME.log in the folder `place`.

    All of its methods raise Unavailable if its environment, its model or the system itself fails.

    Attributes:
        tried: each setting tried on the sample, with its `seconds` or its `error`.
        computes: the precision of its products, read back from the loaded system; empty if that is not known.
    """

    def __init__(self, system: System, task: Task, *, request: int = 0, whole: bool = False) -> None:
        """Start the process, and let it choose its setting.

        Args:
            request: it chooses on concurrent requests with this number of texts each; 0: on one call.
            whole: it chooses on the whole workload, in one call, as a device needs that encodes a sample in no time.
        """
        place, workload = task.place, task.workload
        python, folder = python_of(system.environment, place), converted(task.model, system.form, place)
        package, variables = environment_for(system.environment)
        self._scratch = tempfile.TemporaryDirectory(prefix="embedctl-bench-")
        self._vectors = Path(self._scratch.name) / "vectors.npy"
        # -P: nothing in the working directory is taken for a module.
        super().__init__([str(python), "-P", "-m", package], variables, place / f"{system.name}.log")
        fixed = dict(system.fixed)
        if system.ours:
            fixed = {"chunk": workload.chunk, "cache": str(place / "cache"), **fixed}
        fits = [replace(each, fixed=fixed) for each in system.settings if each.processes <= len(task.cpus)]
        if whole:
            sample, at_once = len(workload.lengths), 0
        else:
            sample, at_once = sample_of(task, request=request, chunked=system.ours)
        try:
            loaded = self.call(
                do="load",
                adapter=f".{system.adapter}",
                model=str(folder),
                texts=str(workload.path),
                sample=sample,
                at_once=at_once,
                chunk=workload.chunk,
                cpus=list(task.cpus),
                settings=[asdict(each) for each in fits],
                packages=system.packages,
            )
        except BaseException:
            self.close()
            raise
        self.chosen = fits[loaded["chosen"]]
        self.tried: list[tuple[Setting, dict[str, Any]]] = list(zip(fits, loaded["tried"], strict=True))
        self.computes: str = loaded["computes"]
        self.versions: dict[str, str] = loaded["versions"]

    def encode(self, repeat: int = 1) -> Answer:
        """Encode the workload `repeat` times, in one call; the vectors are those of the first time."""
        done = self.call(do="encode", vectors=str(self._vectors), repeat=repeat)
        return Answer(np.load(self._vectors), **done)

    def requests(self, path: Path, callers: int = 0) -> tuple[Run, Vectors]:
        """Make the requests in a file, a JSON list of lists of texts: all at once, or by so many callers. The vectors
        are of all texts, one request after the other."""
        done = self.call(do="requests", requests=str(path), vectors=str(self._vectors), callers=callers)
        return Run(**done), np.load(self._vectors)

    def close(self) -> None:
        """End the process, and remove its files."""
        super().close()
        self._scratch.cleanup()


def reference_of(task: Task, device: str = "cpu") -> Vectors:
    """Vectors of sentence-transformers on torch in fp32, computed once and kept; raises Unavailable if they can't be.

    On a CPU, texts are encoded one at a time, so without padding; on another device, by torch's name, that would take
    too long.
    """
    alone = (Setting(1, {"backend": "torch", "device": device}, {"batch": 1 if device == "cpu" else 32}),)
    system = replace(SENTENCE_TRANSFORMERS, name="reference", settings=alone)
    name = f"{task.model.name}-{_digest_of_weights(task.model)}-{task.workload.name}-{task.workload.digest}"
    kept = task.place / "reference" / f"{name}{'' if device == 'cpu' else f'-{device}'}.npy"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        process = TunedProcess(system, task)
        try:
            np.save(kept.with_suffix(".unfinished.npy"), process.encode().vectors)
        finally:
            process.close()
        shutil.move(kept.with_suffix(".unfinished.npy"), kept)
    vectors: Vectors = np.load(kept)
    return vectors


def _digest_of_weights(model: Model) -> str:
    """The same for the same weights, in however many files."""
    files = sorted(model.folder.glob("*.safetensors")) or sorted(model.folder.glob("*.bin"))
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:32]


def sample_of(task: Task, *, request: int, chunked: bool) -> tuple[int, int]:
    """The number of texts that a setting is tried with, and of the requests that they are split into; 0 for one call.

    Requests are as large as those that will be measured, because a batch can't be larger than a request. Their number
    is even, and at least that of the CPUs, so that processes have equal shares. The same holds for chunks.
    """
    workload, texts = task.workload, len(task.workload.lengths)
    wanted = max(_FEWEST_SAMPLES, round(_SAMPLE_FLOPS / task.model.flops_per_token / workload.tokens * texts))
    if request:
        at_once = min(texts // request, max(2, len(task.cpus), 2 * round(wanted / (2 * request))))
        return at_once * request, at_once
    if chunked:
        wanted = 2 * workload.chunk * ceil(wanted / (2 * workload.chunk))
    return min(texts, wanted), 0

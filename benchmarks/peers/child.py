"""The parent's side: a system's process, its model, and the reference that its vectors are held against."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from benchmarks.peers.environments import BUILD, HERE, Unavailable, last_line, python_of
from benchmarks.peers.models import Model, folder_of
from benchmarks.peers.registry import BASELINE, SYSTEMS, System
from benchmarks.peers.serving import Setting
from benchmarks.peers.workloads import Workload

#: A tuning run encodes this much of the workload: seconds, not minutes, whatever the model.
_SAMPLE_FLOPS = 5e11
_FEWEST_SAMPLES = 32
_ANSWER_S = 3600


@dataclass(frozen=True, slots=True)
class Encoded:
    """One run over the workload, or several in one.

    Attributes:
        vectors: of the first time.
        began, ended: seconds since 1970.
    """

    seconds: float
    tokens: int
    vectors: np.ndarray
    began: float
    ended: float


class Child:
    """A loaded system. What it prints beside its answers is in `build/peers/NAME.log`."""

    def __init__(self, system: System, model: Model, workload: Workload, cpus: Sequence[int]) -> None:
        """Start it, and let it choose its setting.

        Raises:
            Unavailable: its environment, its model or the engine itself fails.
        """
        python, folder = python_of(system.environment), folder_of(model, system.form)
        self._log = BUILD / f"{system.name}.log"
        self._vectors = BUILD / f"{system.name}.npy"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.peers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=HERE.parents[1],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"},
                start_new_session=True,  # Ctrl-C is for the parent, which stops children in its own time
            )
        settings = system.settings
        if system.chunked:
            settings = [replace(each, load={**each.load, "chunk": workload.chunk}) for each in settings]
        fits = [each for each in settings if each.processes <= len(cpus)]
        try:
            loaded = self._ask(
                do="load",
                engine=f"benchmarks.peers.{system.module}:Engine",
                model=str(folder),
                texts=str(workload.path),
                sample=_sample(model, workload, chunked=system.chunked),
                chunk=workload.chunk,
                cpus=list(cpus),
                settings=[asdict(each) for each in fits],
                packages=system.packages,
            )
        except BaseException:
            self.close()
            raise
        self.setting: str = loaded["setting"]
        self.tried: list[dict[str, Any]] = loaded["tried"]
        self.versions: dict[str, str] = loaded["versions"]

    def encode(self, repeat: int = 1) -> Encoded:
        """Encode the workload so many times over, in one call.

        Raises:
            Unavailable: it failed.
        """
        done = self._ask(do="encode", vectors=str(self._vectors), repeat=repeat)
        return Encoded(done["seconds"], done["tokens"], np.load(self._vectors), done["began"], done["ended"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        line = b""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
                raise Unavailable(f"no answer within {_ANSWER_S} s")
            line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"it died: {last_line(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def close(self) -> None:
        """Let it end by itself, as its engine may have things to stop; then end what is left of it."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def reference_of(model: Model, workload: Workload, cpus: Sequence[int]) -> np.ndarray:
    """The baseline's vectors, each text by itself: no padding, no neighbours. Computed once and kept.

    Raises:
        Unavailable: the baseline is.
    """
    baseline = replace(SYSTEMS[BASELINE], settings=(Setting(1, {"backend": "torch"}, {"batch": 1}),))
    weights = hashlib.sha256((folder_of(model) / "model.safetensors").read_bytes()).hexdigest()[:12]
    kept = BUILD / "reference" / f"{model.name}-{weights}-{workload.name}-{workload.digest}.npy"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        child = Child(baseline, model, workload, cpus)
        try:
            np.save(kept.with_suffix(".unfinished.npy"), child.encode().vectors)
        finally:
            child.close()
        shutil.move(kept.with_suffix(".unfinished.npy"), kept)
    return np.load(kept)


def _sample(model: Model, workload: Workload, *, chunked: bool) -> int:
    """Texts of a sample; chunks that two processes can share evenly, where they take chunks."""
    texts = len(workload.lengths)
    wanted = max(_FEWEST_SAMPLES, round(_SAMPLE_FLOPS / model.flops_per_token / workload.tokens * texts))
    if chunked:
        wanted = 2 * workload.chunk * -(-wanted // (2 * workload.chunk))
    return min(texts, wanted)

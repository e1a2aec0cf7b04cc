"""The parent's side: a system's process, its model, and the reference that its vectors are held against."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_bench.peers.adapters.embedctl_adapters.serving import Setting, Vectors
from embedctl_bench.peers.environments import Unavailable, environment_for, last_line, python_of
from embedctl_bench.peers.models import Model, converted
from embedctl_bench.peers.registry import BASELINE, SYSTEMS, System
from embedctl_bench.peers.workload import Workload

#: A tuning run encodes this much of the workload: seconds, not minutes, whatever the model.
_SAMPLE_FLOPS = 5e11
_FEWEST_SAMPLES = 32
_ANSWER_S = 3600
_STOP_S = 60


@dataclass(frozen=True, slots=True)
class Encoded:
    """One run over the workload, or several in one.

    Attributes:
        vectors: of the first time.
        began, ended: seconds since 1970.
    """

    seconds: float
    tokens: int
    vectors: Vectors
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests that were made at once.

    Attributes:
        seconds: until the last vector of the last one was there; of an engine that stores them, stored.
        fetched: until they had all been fetched (seconds).
        latencies: the same as `seconds` of each request.
        vectors: of all texts, one request after the other.
    """

    seconds: float
    fetched: float
    tokens: int
    latencies: list[float]
    vectors: Vectors


class Child:
    """A loaded system. What it prints beside its answers is in `NAME.log` in the folder of environments."""

    def __init__(
        self,
        system: System,
        model: Model,
        workload: Workload,
        cpus: Sequence[int],
        place: Path,
        *,
        request: int = 0,
    ) -> None:
        """Start it, and let it choose its setting.

        Args:
            place: the folder of environments, and of what is made for them.
            request: it chooses by its speed with several requests of so many texts at once; 0: with one call for all.

        Raises:
            Unavailable: its environment, its model or the engine itself fails.
        """
        python, folder = python_of(system.environment, place), converted(model, system.form, place)
        package, variables = environment_for(system.environment)
        self._log = place / f"{system.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="embedctl-bench-")
        self._vectors = Path(self._scratch.name) / "vectors.npy"
        self._busy = False
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # -P: nothing in the working directory is taken for a module.
                [python, "-P", "-m", package],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **variables},
                start_new_session=True,  # Ctrl-C is for the parent, which stops children in its own time
            )
        fixed = dict(system.fixed)
        if system.ours:
            fixed = {"chunk": workload.chunk, "cache": str(place / "cache"), **fixed}
        fits = [replace(each, fixed=fixed) for each in system.settings if each.processes <= len(cpus)]
        sample, at_once = sample_of(model, workload, request=request, cpus=len(cpus), chunked=system.ours)
        try:
            loaded = self._ask(
                do="load",
                engine=f".{system.module}:Engine",
                model=str(folder),
                texts=str(workload.path),
                sample=sample,
                at_once=at_once,
                chunk=workload.chunk,
                cpus=list(cpus),
                settings=[asdict(each) for each in fits],
                packages=system.packages,
            )
        except BaseException:
            self.close()
            raise
        self.chosen = Setting(**loaded["chosen"])
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

    def requests(self, path: Path) -> Requests:
        """Make the requests in a file, a JSON list of lists of texts, all at once.

        Raises:
            Unavailable: it failed.
        """
        done = self._ask(do="requests", requests=str(path), vectors=str(self._vectors))
        return Requests(**done, vectors=np.load(self._vectors))

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        line = b""
        self._busy = True
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
                raise Unavailable(f"no answer within {_ANSWER_S} s")
            line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"it died: {last_line(self._log)}")
        self._busy = False
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def close(self) -> None:
        """Let it end by itself, as its engine may have things to stop; then end what is left of it."""
        assert self._process.stdin
        if self._busy:
            self._signal(signal.SIGINT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._scratch.cleanup()

    def _signal(self, number: int) -> None:
        """To it and all that it has started in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def reference_of(model: Model, workload: Workload, cpus: Sequence[int], place: Path, *, ours: bool = False) -> Vectors:
    """The baseline's vectors, each text by itself: no padding, no neighbours. Computed once and kept.

    Args:
        ours: by the sentence-transformers of this environment, in place of the baseline's own.

    Raises:
        Unavailable: the baseline is.
    """
    baseline = replace(SYSTEMS[BASELINE], settings=(Setting(1, {"backend": "torch"}, {"batch": 1}),))
    if ours:
        baseline = replace(baseline, name="reference", environment="")
    kept = place / "reference" / f"{model.name}-{_digest_of_weights(model)}-{workload.name}-{workload.digest}.npy"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        child = Child(baseline, model, workload, cpus, place)
        try:
            np.save(kept.with_suffix(".unfinished.npy"), child.encode().vectors)
        finally:
            child.close()
        shutil.move(kept.with_suffix(".unfinished.npy"), kept)
    vectors: Vectors = np.load(kept)
    return vectors


def _digest_of_weights(model: Model) -> str:
    """The same for the same weights, whatever the files' number."""
    files = sorted(model.folder.glob("*.safetensors")) or sorted(model.folder.glob("*.bin"))
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


def sample_of(model: Model, workload: Workload, *, request: int, cpus: int, chunked: bool) -> tuple[int, int]:
    """How many texts a setting is tried with, and how many requests they are dealt out to; 0 for one call.

    Requests are as large as those that will be measured, as batches can't be larger than a request; an even number of
    them, and one for each CPU, so that processes have equal shares. Chunks are dealt out the same way.
    """
    texts = len(workload.lengths)
    wanted = max(_FEWEST_SAMPLES, round(_SAMPLE_FLOPS / model.flops_per_token / workload.tokens * texts))
    if request:
        at_once = min(texts // request, max(2, cpus, 2 * round(wanted / (2 * request))))
        return at_once * request, at_once
    if chunked:
        wanted = 2 * workload.chunk * ceil(wanted / (2 * workload.chunk))
    return min(texts, wanted), 0

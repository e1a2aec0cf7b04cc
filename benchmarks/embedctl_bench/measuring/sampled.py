"""Systems in processes of their own, pinned, loaded once and asked for samples."""

from __future__ import annotations

import base64
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from embedctl_bench.measuring.models import copy_name
from embedctl_bench.peers.child import ChildProcess, Unavailable
from embedctl_bench.peers.environments import environment_for, python_of
from embedctl_bench.peers.models import converted, uncut
from embedctl_bench.peers.registry import System
from embedctl_config.errors import EmbedctlError
from embedctl_workers.machine.devices import THREAD_VARIABLES, Accelerator, format_cpus
from embedctl_workers.models.files import ModelFiles

_END_S = 20


@dataclass(frozen=True, slots=True)
class Seat:
    """The CPUs and the accelerator that a process runs on."""

    cpus: frozenset[int]
    accelerator: Accelerator | None = None


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: for `seconds` or up to `most` samples, whichever is less, and at least `least` samples.

    Attributes:
        workers: concurrent requests in the process.
    """

    seconds: float
    least: int
    most: int
    workers: int = 1

    def share(self, rounds: int) -> Effort:
        """The effort of one round of several."""
        return Effort(self.seconds / rounds, ceil(self.least / rounds), ceil(self.most / rounds), self.workers)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a loaded system.

    Attributes:
        engine: what executes it, for people.
        threads: compute threads.
        max_tokens: the longest text that it takes whole, special tokens included.
        model_bytes: size of its weights as they are stored.
    """

    engine: str
    threads: int
    max_tokens: int
    model_bytes: int


@dataclass(frozen=True, slots=True)
class Samples:
    """The result of some effort.

    Attributes:
        rate: texts per second, of all processes together.
        latencies: of requests, from a request's texts to its vectors (seconds).
        pre_s, predict_s, post_s: means of a request's steps (seconds); zeros if the system does not show its steps.
    """

    rate: float
    latencies: Sequence[float] = field(default_factory=tuple)
    pre_s: float = 0.0
    predict_s: float = 0.0
    post_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The value of a session's step."""
        return asdict(self)

    @classmethod
    def merged(cls, parts: Sequence[Mapping[str, Any]]) -> Samples:
        """Samples of several rounds, as their steps returned them; the rate is the median."""
        weights = [len(part["latencies"]) for part in parts]
        return cls(
            rate=statistics.median(part["rate"] for part in parts),
            latencies=[each for part in parts for each in part["latencies"]],
            **{
                step: statistics.fmean([part[step] for part in parts], weights)
                for step in ("pre_s", "predict_s", "post_s")
            },
        )


class SampledProcess(ChildProcess):
    """One system with one model, pinned. Use it through :class:`SampledProcesses`, or close it."""

    def __init__(self, system: System, model: ModelFiles, seat: Seat, place: Path) -> None:
        """Load it.

        Args:
            place: the folder of the peers' environments.

        Raises:
            Unavailable: it can't be loaded, or it is a peer, and its environment or its model can't be made.
        """
        command, variables = _peer(system, model, seat, place) if system.environment else _own(system, model, seat)
        super().__init__(command, variables, idle_s=_END_S)
        try:
            self.facts = Facts(**self.answer())
        except BaseException:
            self.close()
            raise

    def sample(self, batches: Sequence[Sequence[str]], effort: Effort) -> Samples:
        """See :func:`sample_together`."""
        return sample_together([self], batches, effort)

    def encode(self, texts: Sequence[str], batch: int) -> npt.NDArray[np.float32]:
        """Vectors of unit length, float32, texts × dimensions, from requests of `batch` texts.

        Raises:
            Unavailable: it failed.
        """
        answer = self.call(do="encode", texts=list(texts), batch=batch)
        flat = np.frombuffer(base64.b64decode(answer["vectors"]), np.float32)
        return flat.reshape(len(texts), -1)

    def count(self, batches: Sequence[Sequence[str]]) -> tuple[int, int]:
        """Tokens of these requests, and tokens computed for them, padding included.

        Raises:
            Unavailable: it failed.
        """
        answer = self.call(do="count", batches=batches)
        return answer["tokens"], answer["computed"]

    def peak_bytes(self) -> int:
        """Peak memory of its process so far; 0 if the kernel does not report it.

        Raises:
            Unavailable: it failed.
        """
        return int(self.call(do="peak")["bytes"])


def _own(system: System, model: ModelFiles, seat: Seat) -> tuple[list[str], dict[str, str]]:
    """The command of a system of this environment, and its variables."""
    request = {
        "runner": system.runner,
        "hardware": system.hardware,
        "model": {"name": model.name, "folder": str(model.folder), "fingerprint": model.fingerprint},
        "cpus": format_cpus(seat.cpus),
        "accelerator": asdict(seat.accelerator) if seat.accelerator else None,
    }
    return [sys.executable, "-m", "embedctl_bench.measuring.sampled_child", json.dumps(request)], {}


def _peer(system: System, model: ModelFiles, seat: Seat, place: Path) -> tuple[list[str], dict[str, str]]:
    """The command of a peer and its variables; makes its environment and its form of the model if need be."""
    python = python_of(system.environment, place)
    # The same name as in `embedctl bench request`, so that the model is converted once.
    folder = converted(uncut(copy_name(model), model.folder, place), system.form, place)
    package, variables = environment_for(system.environment)
    # One process, loaded as the first setting says; it chooses among the options of the settings that load alike.
    first = system.settings[0]
    alike = [each for each in system.settings if (each.processes, each.load) == (1, first.load)]
    request = {
        "adapter": f".{system.adapter}",
        "folder": str(folder),
        "cpus": sorted(seat.cpus),
        "load": {**first.load, **system.fixed},
        "options": [dict(each.encode) for each in alike],
        "thread_variables": THREAD_VARIABLES,
        "label": f"{system.name}, 1×{len(seat.cpus)}",
    }
    # -P: nothing in the working directory is taken for a module.
    return [str(python), "-P", "-m", f"{package}.samples", json.dumps(request)], variables


def sample_together(processes: Sequence[SampledProcess], batches: Sequence[Sequence[str]], effort: Effort) -> Samples:
    """Give the same requests to several processes at once; each process goes through them in turn.

    Args:
        batches: the texts of each request; all are of one size.

    Raises:
        Unavailable: one of them failed.
    """
    for process in processes:
        process.ask(do="sample", batches=batches, **asdict(effort))
    answers, problems = [], []
    for process in processes:
        try:
            answers.append(process.answer())
        except Unavailable as error:  # the others' answers must be read all the same
            problems.append(error)
    if problems:
        raise problems[0]
    steps = [each for answer in answers for each in answer["steps"]]
    pre, predict, post = (statistics.fmean(step) for step in zip(*steps, strict=True))
    return Samples(
        rate=sum(len(answer["latencies"]) * len(batches[0]) / answer["seconds"] for answer in answers),
        latencies=[each for answer in answers for each in answer["latencies"]],
        pre_s=pre,
        predict_s=predict,
        post_s=post,
    )


class SampledProcesses:
    """The loaded processes by system, model and seat. A system that can't be loaded is remembered with the reason.

    Use it as a context manager.

    Args:
        place: the folder of the peers' environments.

    Attributes:
        unavailable: system and model → why it can't be loaded.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self.unavailable: dict[tuple[System, str], str] = {}
        self._running: dict[tuple[System, str, Seat], SampledProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, system: System, model: ModelFiles, seat: Seat) -> SampledProcess:
        """The process, loaded if it is not.

        Raises:
            EmbedctlError: it can't be loaded now, or could not be loaded before.
        """
        if (system, model.name) in self.unavailable:
            raise Unavailable(self.unavailable[system, model.name])
        key = (system, model.name, seat)
        if key not in self._running or self._running[key].closed:
            try:
                self._running[key] = SampledProcess(system, model, seat, self._place)
            except EmbedctlError as error:
                self.unavailable[system, model.name] = str(error)
                raise
        return self._running[key]

    def keep(self, seats: Iterable[Seat], model: ModelFiles) -> None:
        """Close the processes of other seats and of other models, because they hold memory."""
        wanted = set(seats)
        self._end([key for key in self._running if key[1] != model.name or key[2] not in wanted])

    def close(self) -> None:
        """End all processes."""
        self._end(list(self._running))

    def _end(self, keys: Sequence[tuple[System, str, Seat]]) -> None:
        """End processes all at once, because each takes its time."""
        for key in keys:
            self._running[key].dismiss()
        for key in keys:
            self._running.pop(key).close()

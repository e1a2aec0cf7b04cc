"""The parent's side of what is measured: a process for each system, pinned, loaded once and asked sample by sample."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from embedctl.child import guarded
from embedctl_bench.peers.environments import environment_for, python_of
from embedctl_bench.peers.models import converted, uncut
from embedctl_bench.peers.registry import SYSTEMS
from embedctl_config.errors import EmbedctlError, ModelError
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import THREAD_VARIABLES, Accelerator, format_cpus
from embedctl_workers.models.files import ModelFiles

#: Kinds of system.
CLASS, TRANSFORMERS, SENTENCE_TRANSFORMERS, FLOOR = "class", "transformers", "sentence-transformers", "floor"
PEER = "peer"
#: A class that need not be configured to be measured.
ONNX_FP32 = HardwareClass(backend="onnx")
#: The longest that one answer may take (seconds): an artefact may have to be built first.
_ANSWER_S = 3600
_END_S = 20


@dataclass(frozen=True, slots=True)
class System:
    """What is measured: a hardware class of ours, or something else for comparison.

    Attributes:
        kind: one of this module's names.
        hardware: the class.
        peer: the name of one of :mod:`embedctl_bench.peers`.
    """

    kind: str
    hardware: str = ""
    peer: str = ""

    @property
    def name(self) -> str:
        """For people, and for the keys of measurements."""
        return {CLASS: f"embedctl {self.hardware}", PEER: self.peer}.get(self.kind, self.kind)

    @property
    def precision(self) -> str:
        """Of what is not ours; a class has its own."""
        return SYSTEMS[self.peer].precision if self.kind == PEER else "fp32"

    @property
    def ours(self) -> bool:
        """Whether it is a class of ours."""
        return self.kind == CLASS

    def hardware_class(self, settings: Settings) -> HardwareClass:
        """The class's entry; `onnx` is one even where it is not configured.

        Raises:
            SettingsError: there is no such class.
        """
        if self.hardware == "onnx" and "onnx" not in settings.classes:
            return ONNX_FP32
        return settings.hardware_class(self.hardware)


@dataclass(frozen=True, slots=True)
class Seat:
    """What a process runs on."""

    cpus: frozenset[int]
    accelerator: Accelerator | None = None


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: until the seconds are over or there are enough samples, but never fewer than the least.

    Attributes:
        workers: requests that are in the process at once.
    """

    seconds: float
    least: int
    most: int
    workers: int = 1

    def share(self, rounds: int) -> Effort:
        """Of one round among so many."""
        return Effort(self.seconds / rounds, ceil(self.least / rounds), ceil(self.most / rounds), self.workers)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a loaded system says of itself; `threads` compute, `max_tokens` is the longest text that it takes whole."""

    engine: str
    threads: int
    max_tokens: int
    model_bytes: int


@dataclass(frozen=True, slots=True)
class Samples:
    """What came of some effort.

    Attributes:
        rate: texts per second, of all processes together.
        latencies: of requests, from a request's texts to its vectors (seconds).
        pre_s, predict_s, post_s: means of a request's steps; zeros where a system does not show them.
    """

    rate: float
    latencies: Sequence[float] = field(default_factory=tuple)
    pre_s: float = 0.0
    predict_s: float = 0.0
    post_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """For a step of a session."""
        return asdict(self)

    @classmethod
    def merged(cls, parts: Sequence[Mapping[str, Any]]) -> Samples:
        """Those of several rounds, as their steps returned them: the rate is the median."""
        weights = [len(part["latencies"]) for part in parts]
        return cls(
            rate=statistics.median(part["rate"] for part in parts),
            latencies=[each for part in parts for each in part["latencies"]],
            **{
                step: statistics.fmean([part[step] for part in parts], weights)
                for step in ("pre_s", "predict_s", "post_s")
            },
        )


class Engine:
    """One system with one model in a process of its own. Use it through :class:`Engines`, or close it."""

    def __init__(self, system: System, model: ModelFiles, seat: Seat, place: Path) -> None:
        """Load it.

        Args:
            place: the folder of the peers' environments.

        Raises:
            ModelError: it can't be loaded; the message is the process's own.
            Unavailable: it is a peer, and its environment or its model can't be made.
        """
        self.name = f"{system.name}, model {model.name}"
        peer = system.kind == PEER
        command, variables = _peer(system, model, seat, place) if peer else _own(system, model, seat)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **variables},
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which stops children in its own time
        )
        self.closed = False
        self._busy = True
        try:
            self.facts = Facts(**self.answer())
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> None:
        """Send a request; :meth:`answer` waits for what comes of it."""
        assert self._process.stdin
        self._busy = True
        with suppress(BrokenPipeError):  # the answer will say that it died
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the last request.

        Raises:
            ModelError: it failed. A process that died or does not answer is closed.
        """
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            self.close()
            raise ModelError(f"{self.name}: no answer within {_ANSWER_S} s")
        line = self._process.stdout.readline()
        if not line:
            said = self._last_line()
            self.close()
            raise ModelError(f"{self.name}: its process ended: {said}")
        self._busy = False
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ModelError(f"{self.name}: {answer['error']}")
        return answer

    def sample(self, batches: Sequence[Sequence[str]], effort: Effort) -> Samples:
        """See :func:`sample_together`."""
        return sample_together([self], batches, effort)

    def encode(self, texts: Sequence[str], batch: int) -> npt.NDArray[np.float32]:
        """Vectors of unit length, float32, texts × dim, from requests of so many texts.

        Raises:
            ModelError: it failed.
        """
        self.ask(do="encode", texts=list(texts), batch=batch)
        answer = self.answer()
        flat = np.frombuffer(base64.b64decode(answer["vectors"]), np.float32)
        return flat.reshape(len(texts), -1)

    def count(self, batches: Sequence[Sequence[str]]) -> tuple[int, int]:
        """Tokens of these requests, and those computed for them with padding.

        Raises:
            ModelError: it failed.
        """
        self.ask(do="count", batches=batches)
        answer = self.answer()
        return answer["tokens"], answer["computed"]

    def peak_bytes(self) -> int:
        """The most memory that its process has held so far; 0 where the kernel does not say.

        Raises:
            ModelError: it failed.
        """
        self.ask(do="peak")
        return int(self.answer()["bytes"])

    def dismiss(self) -> None:
        """Tell the process that nothing more is to come, and don't wait for its end."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the process; at once if it is at work, and else as it likes."""
        if self.closed:
            return
        self.closed = True
        assert self._process.stdout
        self.dismiss()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._busy else _END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"


def _own(system: System, model: ModelFiles, seat: Seat) -> tuple[list[str], dict[str, str]]:
    """The command of a system of this environment, and its variables."""
    request = {
        "system": asdict(system),
        "model": {"name": model.name, "folder": str(model.folder), "fingerprint": model.fingerprint},
        "cpus": format_cpus(seat.cpus),
        "accelerator": asdict(seat.accelerator) if seat.accelerator else None,
    }
    return [sys.executable, "-m", "embedctl_bench.measuring.engine_child", json.dumps(request)], {}


def _peer(system: System, model: ModelFiles, seat: Seat, place: Path) -> tuple[list[str], dict[str, str]]:
    """The command of a peer and its variables; its environment and its form of the model are made if need be."""
    known = SYSTEMS[system.peer]
    python = python_of(known.environment, place)
    # Under the name that `embedctl bench request` has it converted under.
    name = re.sub(r"[^A-Za-z0-9.]+", "-", model.name).strip("-")
    folder = converted(uncut(f"{name}-{model.fingerprint[:8]}", model.folder, place), known.form, place)
    package, variables = environment_for(known.environment)
    # One process, loaded as the first of its settings says; it chooses among the options of those that load alike.
    alike = [each for each in known.settings if (each.processes, each.load) == (1, known.settings[0].load)]
    request = {
        "module": known.module,
        "folder": str(folder),
        "cpus": sorted(seat.cpus),
        "load": {**known.settings[0].load, **dict(known.fixed)},
        "options": [dict(each.encode) for each in alike],
        "thread_variables": THREAD_VARIABLES,
        "label": f"{system.peer}, 1×{len(seat.cpus)}",
    }
    # -P: nothing in the working directory is taken for a module.
    return [str(python), "-P", "-m", f"{package}.samples", json.dumps(request)], variables


def sample_together(engines: Sequence[Engine], batches: Sequence[Sequence[str]], effort: Effort) -> Samples:
    """Give the same requests to several processes at once, each of which goes through them in turn.

    Args:
        batches: the texts of each request; all are of one size.

    Raises:
        ModelError: one of them failed.
    """
    for engine in engines:
        engine.ask(do="sample", batches=batches, **asdict(effort))
    answers, problems = [], []
    for engine in engines:
        try:
            answers.append(engine.answer())
        except ModelError as error:  # the others' answers are to be taken, too
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


class Engines:
    """The processes that are loaded, by system, model and seat; those that fail are known as lost, with the reason.

    Use it as a context manager.

    Args:
        place: the folder of the peers' environments.

    Attributes:
        lost: system and model → why it can't be loaded.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self.lost: dict[tuple[System, str], str] = {}
        self._running: dict[tuple[System, str, Seat], Engine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, system: System, model: ModelFiles, seat: Seat) -> Engine:
        """The process, loaded if it is not.

        Raises:
            ModelError, Unavailable: it can't be loaded, or could not be before.
        """
        if (system, model.name) in self.lost:
            raise ModelError(self.lost[system, model.name])
        key = (system, model.name, seat)
        if key not in self._running or self._running[key].closed:
            try:
                self._running[key] = Engine(system, model, seat, self._place)
            except EmbedctlError as error:
                self.lost[system, model.name] = str(error)
                raise
        return self._running[key]

    def keep(self, seats: Iterable[Seat], model: ModelFiles) -> None:
        """Close all processes of other seats and of other models: they hold memory."""
        wanted = set(seats)
        self._end([key for key in self._running if key[1] != model.name or key[2] not in wanted])

    def close(self) -> None:
        """End all processes."""
        self._end(list(self._running))

    def _end(self, keys: Sequence[tuple[System, str, Seat]]) -> None:
        """All at once: a process takes its time."""
        for key in keys:
            self._running[key].dismiss()
        for key in keys:
            self._running.pop(key).close()

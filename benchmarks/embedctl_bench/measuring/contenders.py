"""Systems that take turns on one model, each in a process that is started when first needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from embedctl_bench.measuring.comparison import Load, Scene, SystemRuns
from embedctl_bench.measuring.sampling import turn_of
from embedctl_bench.measuring.session import Session
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Vectors
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.registry import GPU_FLOOR, Setting, System
from embedctl_bench.peers.tuned import Run, Task, TunedSystem
from embedctl_config.errors import EmbedctlError
from embedctl_workers.arrays.distance import measure as distance


@dataclass(frozen=True, slots=True)
class Ground:
    """What all systems have in common on one model.

    Attributes:
        key: the beginning of the keys of steps.
        reference: the vectors of the task's texts, float32, texts × dimensions.
        quick: whether systems take their first setting without trying any.
        request: they choose on concurrent requests with this number of texts each; 0: on one call.
        least_s: how long a pass over the texts is to take at least, by repeating them (seconds): of a device, which
            encodes a sample in no time, so that systems choose on the whole workload. 0 for one pass.
        warm_up: requests that a system gets first of all, besides the workload.
    """

    key: str
    task: Task
    reference: Vectors
    session: Session
    quick: bool
    request: int = 0
    least_s: float = 0.0
    warm_up: Sequence[Sequence[str]] = ()

    def accuracy(self, vectors: Vectors) -> dict[str, float]:
        """How far vectors are from the reference; empty for a floor's; Unavailable if they are not those of the
        texts."""
        if not vectors.shape[-1]:
            return {}
        try:
            found = distance(vectors, self.reference)
        except ValueError as error:
            raise Unavailable(str(error)) from None
        return {name: getattr(found, name) for name in ("max_abs_error", "min_cosine", "mean_cosine")}


class Contender:
    """One system on one model: its process, and its runs.

    Attributes:
        repeat: how often it encodes the texts in one pass.
    """

    def __init__(self, system: System, ground: Ground) -> None:
        self.runs = SystemRuns.of(system)
        self.repeat = 1
        self._system, self._ground = system, ground
        self._process: TunedSystem | None = None
        self._accuracy: Mapping[str, float] = {}

    def choose(self) -> None:
        """Let it choose its setting, and compare its vectors, unless both are kept; Unavailable if any of that
        fails."""
        # A quick run tries none and takes the first.
        settings = self._system.settings[:1] if self._ground.quick else self._system.settings

        def facts() -> dict[str, Any]:
            process = self._start(settings)
            return {
                "chosen": asdict(process.chosen),
                "tried": [{**each, "setting": self._words(setting)} for setting, each in process.tried],
                "versions": process.versions,
                "computes": process.computes,
                "accuracy": self._accuracy,
            }

        found = self._ground.session.step(f"{self._ground.key}/loading/{self.runs.name}", facts)
        chosen = Setting(**found["chosen"])
        self._system = replace(self._system, settings=(chosen,))
        self.runs.setting = self._words(chosen)
        self.runs.tried, self.runs.versions, self.runs.accuracy = found["tried"], found["versions"], found["accuracy"]
        self.runs.read_back(found["computes"])

    def process(self) -> TunedSystem:
        """Its process, warmed up; raises Unavailable if it can't be started."""
        return self._process or self._start(self._system.settings)

    def close(self) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def _start(self, settings: tuple[Setting, ...]) -> TunedSystem:
        ground, system = self._ground, replace(self._system, settings=settings)
        whole = ground.least_s > 0
        self._process = process = TunedSystem(system, ground.task, request=ground.request, whole=whole)
        if ground.warm_up:
            process.requests(ground.warm_up)
        self._accuracy = ground.accuracy(process.encode().vectors)
        if whole and system.name != GPU_FLOOR.name:  # its seconds are computed, so repeating them changes nothing
            done = process.encode()
            self.repeat = max(1, math.ceil(ground.least_s / (done.ended - done.began)))
        return process

    def _words(self, setting: Setting) -> str:
        """The setting for people: of our whole product, its workers."""
        cpus = len(self._ground.task.cpus)
        if not (self._system.ours and "workers" in setting.load):
            return setting.label(cpus)
        workers = setting.load["workers"]
        return f"{workers} worker{'s' * (workers > 1)} of {cpus // workers} CPU{'s' * (cpus // workers > 1)}"


def answer(load: Load, contender: Contender) -> Run:
    """Let a system answer all requests of a load once; raises Unavailable if it fails, or if vectors are wrong."""
    done, vectors = contender.process().requests(load.asked, load.callers)
    if len(vectors) != load.texts:
        raise Unavailable(f"vectors of shape {vectors.shape} for {load.texts} texts")
    if not np.isfinite(vectors).all():
        raise Unavailable("its vectors hold NaN")
    return done


def compete(
    scene: Scene, systems: Sequence[System], ground: Ground, run: Callable[[Load, Contender], Run] = answer
) -> None:
    """Let every system choose its setting, then measure all of them, load by load and round by round, into the scene.

    A system that fails is left out from then on, with a note. Every round is a step of the session.

    Args:
        run: measures a system once; raises Unavailable if it fails.
    """
    contenders = [Contender(system, ground) for system in systems]
    scene.runs = [contender.runs for contender in contenders]
    with ExitStack() as stack:
        for contender in contenders:
            stack.callback(contender.close)
            try:
                contender.choose()
            except EmbedctlError as error:
                _leave_out(contender, error, ground)
        for load in scene.loads:
            finals = scene.finalists() if load.finals else {each.runs.name for each in contenders}
            _take_turns([each for each in contenders if each.runs.name in finals], load, ground, run)


def _take_turns(
    contenders: Sequence[Contender], load: Load, ground: Ground, run: Callable[[Load, Contender], Run]
) -> None:
    for number in range(load.rounds):
        able = {each.runs.name: each for each in contenders if not each.runs.unavailable}
        order = turn_of(list(able), number)

        def measured() -> dict[str, Mapping[str, Any]]:
            return {name: _measured(able[name], load, run, ground) for name in order}  # noqa: B023  (it runs at once)

        values = ground.session.step(f"{ground.key}/{load.name}/{number + 1}", measured, needs=order)
        for name in order:
            if "failed" in values[name]:
                _leave_out(able[name], values[name]["failed"], ground)
            else:
                able[name].runs.loads.setdefault(load.name, {})[number] = Run(**values[name])


def _measured(
    contender: Contender, load: Load, run: Callable[[Load, Contender], Run], ground: Ground
) -> Mapping[str, Any]:
    """Its run, or the reason why it fails."""
    try:
        found = run(load, contender)
    except EmbedctlError as error:
        return {"failed": str(error) or type(error).__name__}
    ground.session.say(f"  {contender.runs.name}: {found.seconds:.4g} s")
    return asdict(found)


def _leave_out(contender: Contender, why: object, ground: Ground) -> None:
    contender.close()  # it should hold no memory
    contender.runs.unavailable = str(why)
    ground.session.say(f"{contender.runs.label}: not available: {why}")

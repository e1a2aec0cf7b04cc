"""Systems that take turns on one model, each in a process that is started when first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from embedctl_bench.measuring.comparison import Run, SystemRuns, distance
from embedctl_bench.measuring.sampling import Rounds, in_rounds
from embedctl_bench.measuring.session import Session
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Setting, Vectors
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import System
from embedctl_bench.peers.tuned import TunedProcess
from embedctl_bench.peers.workload import Workload
from embedctl_config.errors import EmbedctlError


@dataclass(frozen=True, slots=True)
class Ground:
    """What all systems have in common on one model.

    Attributes:
        key: the beginning of the keys of steps.
        workload: the texts with references; systems choose their settings on a sample of them.
        reference: the vectors of these texts, float32, texts × dimensions.
        place: the folder of environments and of everything that is made for them.
        quick: whether systems take their first setting without trying any.
        whole: whether they choose on the whole workload, as a device needs that encodes a sample in no time.
        request: they choose on concurrent requests with this number of texts each; 0: on one call.
    """

    key: str
    model: Model
    workload: Workload
    reference: Vectors
    cpus: Sequence[int]
    place: Path
    session: Session
    quick: bool
    whole: bool = False
    request: int = 0

    def distance(self, vectors: Vectors) -> dict[str, Any]:
        """How far vectors are from the reference.

        Raises:
            Unavailable: they are not those of the texts.
        """
        try:
            return distance(vectors, self.reference)
        except ValueError as error:
            raise Unavailable(str(error)) from None


class Contender:
    """One system on one model: its process, and its runs."""

    def __init__(self, system: System, ground: Ground, warm_up: Callable[[TunedProcess], object]) -> None:
        """Nothing is started.

        Args:
            warm_up: gets the process as soon as it has chosen its setting.
        """
        self.runs = SystemRuns.of(system)
        self._system, self._ground, self._warm_up = system, ground, warm_up
        self._process: TunedProcess | None = None
        self._accuracy: Mapping[str, Any] = {}

    def choose(self) -> None:
        """Let it choose its setting, unless an earlier run has kept its choice.

        Raises:
            Unavailable: its environment, the model in its format, or the system itself fails.
        """
        # A quick run tries none and takes the first.
        settings = self._system.settings[:1] if self._ground.quick else self._system.settings
        names = {each.label(len(self._ground.cpus)): self._words(each) for each in settings}

        def facts() -> dict[str, Any]:
            process = self._start(settings)
            tried = [{**each, "setting": names[each["setting"]]} for each in process.tried]
            return {
                "chosen": asdict(process.chosen),
                "tried": tried,
                "versions": process.versions,
                "computes": process.computes,
            }

        found = self._ground.session.step(f"{self._ground.key}/setting/{self.runs.name}", facts)
        chosen = Setting(**found["chosen"])
        self._system = replace(self._system, settings=(replace(chosen, fixed={}),))
        self.runs.setting = self._words(chosen)
        self.runs.tried, self.runs.versions = found["tried"], found["versions"]
        self.runs.read_back(found.get("computes", ""))

    def process(self) -> TunedProcess:
        """Its process, warmed up.

        Raises:
            Unavailable: it can't be started.
        """
        return self._process or self._start(self._system.settings)

    def accuracy(self) -> Mapping[str, Any]:
        """How far its vectors of the workload are from the reference; measured once.

        Raises:
            Unavailable: it failed.
        """
        if not self._accuracy:
            key = f"{self._ground.key}/accuracy/{self.runs.name}"
            self._accuracy = self._ground.session.step(
                key, lambda: self._ground.distance(self.process().encode().vectors)
            )
        return self._accuracy

    def close(self) -> None:
        """End its process."""
        if self._process:
            self._process.close()
            self._process = None

    def _start(self, settings: tuple[Setting, ...]) -> TunedProcess:
        ground, system = self._ground, replace(self._system, settings=settings)
        self._process = TunedProcess(
            system,
            ground.model,
            ground.workload,
            ground.cpus,
            ground.place,
            request=ground.request,
            whole=ground.whole,
        )
        self._warm_up(self._process)
        return self._process

    def _words(self, setting: Setting) -> str:
        """The setting for people: of our whole product, its workers."""
        cpus = len(self._ground.cpus)
        if not (self._system.ours and "workers" in setting.load):
            return setting.label(cpus)
        workers = setting.load["workers"]
        return f"{workers} worker{'s' * (workers > 1)} of {cpus // workers} CPU{'s' * (cpus // workers > 1)}"


def choose_settings(contenders: Sequence[Contender], stack: ExitStack, session: Session) -> list[Contender]:
    """Let each contender choose its setting; return those that are available.

    Args:
        stack: closes the contenders.
    """
    able = []
    for contender in contenders:
        stack.callback(contender.close)
        try:
            contender.choose()
        except EmbedctlError as error:
            contender.close()
            contender.runs.unavailable = str(error)
            session.note(f"{contender.runs.label}: not available: {error}")
            session.more(-1)
            continue
        able.append(contender)
    return able


def take_turns(
    contenders: Sequence[Contender],
    measure: Callable[[Contender], Run],
    load: str,
    *,
    rounds: int,
    repeats: int,
    session: Session,
    key: str,
) -> None:
    """Measure each contender once a round, and put the rounds into its runs of the load.

    Args:
        repeats, key: as :func:`~embedctl_bench.measuring.sampling.in_rounds`.
    """
    by_name = {contender.runs.name: contender for contender in contenders}
    found: dict[str, Rounds[Mapping[str, Any]]] = {}
    try:
        in_rounds(
            {name: partial(_turn, contender, measure) for name, contender in by_name.items()},
            rounds,
            session=session,
            key=key,
            into=found,
            repeats=repeats,
        )
    finally:
        for name, each in found.items():
            by_name[name].runs.loads[load] = each.each(lambda run: Run(**run))


def _turn(contender: Contender, measure: Callable[[Contender], Run]) -> Mapping[str, Any]:
    try:
        return measure(contender).to_json()
    except Unavailable:
        contender.close()  # it gets no further turn, so it should hold no memory
        raise

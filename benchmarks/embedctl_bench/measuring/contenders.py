"""Systems that take turns on one model, each in a process that is started when first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

from embedctl_bench.measuring.comparison import R, S
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
    """

    key: str
    model: Model
    workload: Workload
    reference: Vectors
    cpus: Sequence[int]
    place: Path
    session: Session
    quick: bool


class Contender(Generic[S]):
    """One system on one model: its process, and its runs."""

    def __init__(
        self,
        system: System,
        runs: S,
        ground: Ground,
        warm_up: Callable[[TunedProcess], object],
        *,
        request: int = 0,
    ) -> None:
        """Nothing is started.

        Args:
            warm_up: gets the process as soon as it has chosen its setting.
            request: as :class:`~embedctl_bench.peers.tuned.TunedProcess`.
        """
        self.runs = runs
        self._system, self._ground, self._warm_up, self._request = system, ground, warm_up, request
        self._process: TunedProcess | None = None

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

    def close(self) -> None:
        """End its process."""
        if self._process:
            self._process.close()
            self._process = None

    def _start(self, settings: tuple[Setting, ...]) -> TunedProcess:
        ground, system = self._ground, replace(self._system, settings=settings)
        self._process = TunedProcess(
            system, ground.model, ground.workload, ground.cpus, ground.place, request=self._request
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


def choose_settings(
    contenders: Sequence[Contender[S]], stack: ExitStack, session: Session, rounds: int
) -> list[Contender[S]]:
    """Let each contender choose its setting; return those that are available.

    Args:
        stack: closes the contenders.
        rounds: planned steps of each, which are taken from the plan if it is not available.
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
            session.more(-1 - rounds)
            continue
        able.append(contender)
    return able


def take_turns(
    contenders: Sequence[Contender[Any]],
    measure: Callable[[Contender[Any]], Mapping[str, Any]],
    kind: type[R],
    *,
    rounds: int,
    repeats: int,
    session: Session,
    key: str,
) -> None:
    """Measure each contender once a round, and put the rounds into its runs.

    Args:
        measure: returns a run as JSON.
        kind: the class of the runs.
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
            figure=lambda run: float(run["seconds"]),
            repeats=repeats,
        )
    finally:
        for name, each in found.items():
            by_name[name].runs.rounds = each.each(kind.of_json)


def _turn(contender: Contender[Any], measure: Callable[[Contender[Any]], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return measure(contender)
    except Unavailable:
        contender.close()  # it gets no further turn, so it should hold no memory
        raise

"""`embedctl bench request`: infinity's benchmark, ten requests of long texts in flight, through the whole product."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedctl_bench.asking import Asked, common, conclude
from embedctl_bench.measuring.sampling import REPEATS, Rounds, in_rounds
from embedctl_bench.request.results import Results, Run, Shape
from embedctl_bench.request.texts import REQUESTS, TEXTS, request_texts
from embedctl_config.errors import EmbedctlError
from embedctl_workers.models.cache import cache_folder, private_folder

if TYPE_CHECKING:
    from embedctl_bench.measuring.session import Session
    from embedctl_bench.peers.registry import System
    from embedctl_bench.request.systems import Contender, Ground

WHOLE = Shape("whole", "the whole shape", (TEXTS,) * REQUESTS)
#: 255 texts in all: 25 and 26 by turns.
TENTH = Shape("tenth", "a tenth of the shape", (25, 26) * (REQUESTS // 2))
QUICK = Shape("quick", "requests of 3 texts", (3,) * REQUESTS)
#: A machine with so many CPUs runs the whole shape in every round.
_LARGE_MACHINE = 16
_ROUNDS, _QUICK_ROUNDS = 3, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: a shape in rounds, and perhaps another one once, of ours and of the fastest of the others.

    Attributes:
        repeats: how often the rounds of a noisy system are run again at most.
    """

    shape: Shape
    rounds: int
    once: Shape | None = None
    repeats: int = REPEATS

    @classmethod
    def of(cls, cpus: int, *, quick: bool) -> Plan:
        """For so many CPUs."""
        if quick:
            return cls(QUICK, _QUICK_ROUNDS, repeats=0)
        return cls(WHOLE, _ROUNDS) if cpus >= _LARGE_MACHINE else cls(TENTH, _ROUNDS, WHOLE)

    def steps(self, classes: int, peers: int) -> int:
        """Measurements of one model, but those of the fastest others."""
        return (classes + peers) * (1 + self.rounds) + (classes if self.once else 0)


@click.command("request")
@common(peers=True)
def command(asked: Asked) -> None:
    """Ten requests of 255 long texts in flight, from submit to last vector stored: infinity's benchmark.

    Each class runs as the whole product: a private Redis, workers, and several processes that submit. Others are called
    as their users call them, with the same texts on the same CPUs, by turns. On fewer than 16 CPUs every system gets a
    tenth of the texts three times, and ours and the fastest of the others get all of them once.
    """
    from embedctl_bench.peers.registry import SYSTEMS
    from embedctl_bench.request.report import report_of
    from embedctl_bench.request.systems import choose_peers, product, requirements

    place = private_folder(cache_folder(asked.settings) / "peers")
    peers, uninstalled = choose_peers(asked.peers, place)
    plan = Plan.of(len(asked.cpus), quick=asked.quick)
    systems = [*(product(name, asked) for name in asked.classes), *(SYSTEMS[name] for name in peers)]
    steps = plan.steps(len(asked.classes), len(peers)) * len(asked.models)
    classes = {name: asdict(entry) for name, entry in asked.settings.classes.items()}
    session = asked.session("request", steps, classes=classes, peers=requirements())
    found: list[Results] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            results = Results(name, plan.shape, plan.rounds, plan.once, uninstalled=uninstalled)
            found.append(results)
            _measure(_ground(name, asked, plan, place, session, results), systems, plan, results)
    conclude(report_of(found, asked), asked, session)


def _ground(name: str, asked: Asked, plan: Plan, place: Path, session: Session, results: Results) -> Ground:
    """A model ready to be measured, and the references of some texts."""
    from embedctl_bench.measuring.shapes import describe, source_of
    from embedctl_bench.peers.child import reference_of
    from embedctl_bench.peers.models import uncut
    from embedctl_bench.peers.workload import Workload
    from embedctl_bench.request.systems import Ground, kept
    from embedctl_workers.models.files import resolve_model

    files = resolve_model(source_of(name, asked.settings), asked.settings.models.get(name))
    slug = f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}-{files.fingerprint[:8]}"
    model = uncut(slug, files.folder, place)
    # The first texts of each request, which are in every shape.
    checked = plan.shape if plan.shape.texts < TENTH.texts else TENTH
    texts = [text for number, count in enumerate(checked.sizes) for text in request_texts(number, count)]
    path = kept(texts, place, f"texts-{checked.name}")
    workload = Workload(f"requests-{checked.name}", path, model.lengths(texts), chunk=TEXTS)
    cpus = sorted(asked.cpus)
    session.say(f"{name}: {len(texts)} references, one text at a time by torch in fp32, unless they are kept already")
    reference = reference_of(model, workload, cpus, place, ours=True)
    results.model, results.limit, results.lengths = describe(name), model.max_tokens, workload.lengths
    return Ground(slug, model, workload, checked, reference, cpus, place, session, asked.quick)


def _measure(ground: Ground, systems: Sequence[System], plan: Plan, results: Results) -> None:
    """Every system in rounds; then ours and the fastest of the others once with the other shape, if there is one."""
    from embedctl_bench.request.systems import Contender

    session = ground.session
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for system in systems:
            contender = Contender(system, ground)
            stack.callback(contender.close)
            results.systems.append(contender.result)
            try:
                contender.choose()
            except EmbedctlError as error:
                contender.result.unavailable = str(error)
                session.note(f"{contender.result.label}: not available: {error}")
                session.more(-1 - plan.rounds)
                continue
            contenders[contender.result.name] = contender
        _rounds(ground, contenders, plan)
        if plan.once is not None:
            finalists = results.finalists()
            session.more(len(finalists) - sum(system.ours for system in systems))
            for name in finalists:
                _once(ground, contenders[name], plan.once)


def _rounds(ground: Ground, contenders: Mapping[str, Contender], plan: Plan) -> None:
    """By turns, round after round."""
    found: dict[str, Rounds[dict[str, Any]]] = {}
    cases = {name: partial(contender.run, plan.shape) for name, contender in contenders.items()}
    try:
        in_rounds(
            cases,
            plan.rounds,
            session=ground.session,
            key=f"{ground.key}/{plan.shape.name}",
            into=found,
            figure=lambda run: float(run["seconds"]),
            repeats=plan.repeats,
        )
    finally:
        for name, each in found.items():
            contenders[name].result.rounds = each.each(Run.of_json)


def _once(ground: Ground, contender: Contender, shape: Shape) -> None:
    key = f"{ground.key}/{shape.name}/{contender.result.name}"
    try:
        contender.result.whole = Run.of_json(ground.session.step(key, partial(contender.run, shape)))
    except EmbedctlError as error:
        ground.session.note(f"{contender.result.label}, {shape.words}: failed: {error}")

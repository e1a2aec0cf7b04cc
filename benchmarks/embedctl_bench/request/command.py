"""`embedctl bench request`: infinity's benchmark, ten requests of long texts in flight, through the whole product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import click

from embedctl_bench.asking import common, conclude
from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.contenders import Contender, choose_settings, take_turns
from embedctl_bench.measuring.models import copy_name, model_files, peers_folder
from embedctl_bench.measuring.session import Session
from embedctl_bench.measuring.shapes import describe
from embedctl_bench.peers.environments import requirements_digest
from embedctl_bench.peers.models import uncut
from embedctl_bench.peers.registry import System, baselines_for, choose_peers, product_of
from embedctl_bench.peers.tuned import reference_of
from embedctl_bench.peers.workload import Workload
from embedctl_bench.request.http import measure as over_http
from embedctl_bench.request.http.report import report as http_report
from embedctl_bench.request.http.results import HttpResult
from embedctl_bench.request.report import report
from embedctl_bench.request.results import TENTH, RequestPlan, RequestResult, RequestRun, RequestShape, RequestSystem
from embedctl_bench.request.systems import RequestGround, kept
from embedctl_bench.request.texts import TEXTS, request_texts
from embedctl_config.errors import EmbedctlError
from embedctl_workers.models.cache import private_folder


@click.command("request")
@common(peers=True)
@click.option(
    "--http",
    is_flag=True,
    envvar="EMBEDCTL_HTTP",
    show_envvar=True,
    help="Measure `embedctl gateway` over HTTP instead, also with single texts and with many callers; "
    "`--peers infinity` measures infinity's server beside it.",
)
def command(asked: Asked, http: bool) -> None:
    """Ten concurrent requests of 255 long texts: infinity's benchmark.

    Times each run from submit until the last vector is stored. Each class runs embedctl end to end: a private Redis,
    workers, and several processes that submit. Other systems are called as their users call them. All systems encode
    the same texts on the same CPUs, in turn. On fewer than 16 CPUs, every system encodes a tenth of the texts three
    times; embedctl and the fastest other systems also encode all texts once.
    """
    if http:
        _over_http(asked)
        return
    place = private_folder(peers_folder(asked.settings))
    peers, uninstalled = choose_peers(asked.peers, place)
    plan = RequestPlan.of(len(asked.cpus), quick=asked.quick)
    products = [product(name, asked) for name in asked.classes]
    # Unless no other system is wanted.
    peers = [*([] if asked.peers == () else baselines_for(products, peers)), *peers]
    systems = [*products, *peers]
    steps = plan.steps(len(asked.classes), len(peers)) * len(asked.models)
    classes = {name: asdict(entry) for name, entry in asked.settings.classes.items()}
    session = asked.session("request", steps, classes=classes, peers=requirements_digest())
    found: list[RequestResult] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            result = RequestResult(name, plan, uninstalled=uninstalled)
            found.append(result)
            measure(ground(result, asked, place, session), systems, result)
    conclude(report(found, asked), asked, session)


def _over_http(asked: Asked) -> None:
    cells = [(name, hardware) for name in asked.models for hardware in asked.classes]
    session = asked.session("request-http", over_http.steps(asked) * len(cells), peers=requirements_digest())
    found: list[HttpResult] = []
    with suppress(KeyboardInterrupt), session:
        for name, hardware in cells:
            found.append(over_http.measure(name, hardware, asked, session))
    conclude(http_report(found, asked), asked, session)


def product(hardware: str, asked: Asked) -> System:
    """Our whole product with a hardware class, and with chunks of the size that is set.

    Raises:
        SettingsError: there is no such class.
    """
    system = product_of(hardware, asked.settings, len(asked.cpus))
    return replace(system, fixed={**system.fixed, "chunk": asked.settings.chunk_size})


def ground(result: RequestResult, asked: Asked, place: Path, session: Session) -> RequestGround:
    """A model ready to be measured, and the references of some texts."""
    name, shape = result.name, result.plan.shape
    files = model_files(name, asked.settings)
    model = uncut(copy_name(files), files.folder, place)
    # The first texts of each request, which are in every shape.
    checked = shape if shape.texts < TENTH.texts else TENTH
    texts = [text for number, count in enumerate(checked.sizes) for text in request_texts(number, count)]
    path = kept(texts, place, f"texts-{checked.name}")
    workload = Workload(f"requests-{checked.name}", path, model.lengths(texts), chunk=TEXTS)
    cpus = sorted(asked.cpus)
    session.say(f"{name}: {len(texts)} references, one text at a time by torch in fp32, unless they are kept already")
    reference = reference_of(model, workload, cpus, place)
    result.model, result.limit, result.lengths = describe(name), model.max_tokens, workload.lengths
    return RequestGround(model.name, model, workload, reference, cpus, place, session, asked.quick, checked)


def measure(ground: RequestGround, systems: Sequence[System], result: RequestResult) -> None:
    """Measure every system in rounds, then ours and the fastest other systems once with the other shape, if any."""
    plan, session = result.plan, ground.session
    with ExitStack() as stack:
        contenders = [ground.contender(system) for system in systems]
        result.systems += [contender.runs for contender in contenders]
        able = choose_settings(contenders, stack, session, plan.rounds)
        take_turns(
            able,
            partial(ground.run, shape=plan.shape),
            RequestRun,
            rounds=plan.rounds,
            repeats=plan.repeats,
            session=session,
            key=f"{ground.key}/{plan.shape.name}",
        )
        if plan.once is not None:
            _once(ground, {contender.runs.name: contender for contender in able}, plan.once, result)


def _once(
    ground: RequestGround,
    contenders: Mapping[str, Contender[RequestSystem]],
    shape: RequestShape,
    result: RequestResult,
) -> None:
    finalists = result.finalists()
    ground.session.more(len(finalists) - sum(system.ours for system in result.systems))
    for name in finalists:
        runs = contenders[name].runs
        try:
            done = ground.session.step(
                f"{ground.key}/{shape.name}/{name}", partial(ground.run, contenders[name], shape)
            )
            runs.whole = RequestRun.of_json(done)
        except EmbedctlError as error:
            ground.session.note(f"{runs.label}, {shape.words}: failed: {error}")

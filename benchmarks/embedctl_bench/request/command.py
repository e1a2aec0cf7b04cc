"""`embedctl bench request`: infinity's benchmark, ten requests of long texts in flight, through the whole product."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np

from embedctl_bench.asking import Asked, common, conclude
from embedctl_bench.measuring.comparison import Run
from embedctl_bench.measuring.contenders import Contender, Ground, choose_settings, take_turns
from embedctl_bench.measuring.session import Session
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.environments import requirements_digest
from embedctl_bench.peers.models import Model, describe, measured_model, model_files, peers_folder, slug
from embedctl_bench.peers.registry import (
    INFINITY_SERVER,
    System,
    baselines_for,
    choose_peers,
    direct_of,
    gateway_of,
    product_of,
)
from embedctl_bench.peers.tuned import TunedProcess, reference_of
from embedctl_bench.peers.workload import Workload, kept
from embedctl_bench.request.http_report import HttpResult, http_report
from embedctl_bench.request.loads import Load, RequestPlan
from embedctl_bench.request.report import RequestResult, report
from embedctl_bench.texts.words import REQUESTS, TEXTS
from embedctl_bench.texts.workloads import make_workload
from embedctl_config.errors import EmbedctlError
from embedctl_workers.models.cache import private_folder

#: Texts whose vectors are compared before anything is timed over HTTP.
_CHECKED = 64


@click.command("request")
@common
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
    plan = RequestPlan.of(len(asked.cpus), quick=asked.quick)
    place = private_folder(peers_folder(asked.settings))
    if http:
        _over_http(asked, plan, place)
        return
    peers, uninstalled = choose_peers(asked.peers, place)
    products = [_product(name, asked) for name in asked.classes]
    # Unless no other system is wanted.
    peers = [*([] if asked.peers == () else baselines_for(products, peers)), *peers]
    steps = len(asked.models) * (len(products) + len(peers) + plan.rounds + bool(plan.once))
    session = asked.session("request", steps, peers=requirements_digest())
    few = kept([each[:3] for each in plan.load.requests], place, "requests-few")

    def warm_up(process: TunedProcess) -> None:
        process.requests(few)

    found: list[RequestResult] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            model = measured_model(name, asked.settings, place)
            result = RequestResult(name, describe(name), plan, model.max_tokens, uninstalled)
            found.append(result)
            ground = _ground(model, result, asked, place, session)
            contenders = [Contender(system, ground, warm_up) for system in (*products, *peers)]
            _measure(contenders, ground, result)
    conclude(report(found, asked), asked, session)


def _product(hardware: str, asked: Asked) -> System:
    """Our whole product with a hardware class, and with chunks of the size that is set."""
    system = product_of(hardware, asked.settings, len(asked.cpus))
    return replace(system, fixed={**system.fixed, "chunk": asked.settings.chunk_size})


def _ground(model: Model, result: RequestResult, asked: Asked, place: Path, session: Session) -> Ground:
    """A model ready to be measured, and the references of the texts of the load of the rounds, a tenth at most."""
    texts = [text for request in result.checked for text in request]
    workload = Workload("requests", kept(texts, place, "texts"), model.lengths(texts), chunk=TEXTS)
    cpus = sorted(asked.cpus)
    session.say(f"{result.name}: {len(texts)} references, one text at a time by torch in fp32, unless they are kept")
    reference = reference_of(model, workload, cpus, place)
    result.lengths = workload.lengths
    per_request = len(texts) // REQUESTS
    return Ground(model.name, model, workload, reference, cpus, place, session, asked.quick, request=per_request)


def _measure(contenders: list[Contender], ground: Ground, result: RequestResult) -> None:
    """Measure every system in rounds, then ours and the fastest other systems once with the other load, if any."""
    plan, session = result.plan, ground.session
    result.runs = [contender.runs for contender in contenders]
    with ExitStack() as stack:
        able = choose_settings(contenders, stack, session)
        turns = partial(take_turns, session=session)
        run = partial(_run, ground, result)
        key = f"{ground.key}/{plan.load.name}"
        turns(able, partial(run, plan.load), plan.load.name, rounds=plan.rounds, repeats=plan.repeats, key=key)
        if plan.once:
            finalists = result.finalists()
            chosen = [contender for contender in able if contender.runs.name in finalists]
            key = f"{ground.key}/{plan.once.name}"
            turns(chosen, partial(run, plan.once), plan.once.name, rounds=1, repeats=0, key=key)


def _run(ground: Ground, result: RequestResult, load: Load, contender: Contender) -> Run:
    """Make the requests of a load, and compare the vectors of their first texts, which have references.

    Raises:
        Unavailable: it failed, or there are more or fewer vectors than texts.
    """
    done = contender.process().requests(_file(load, ground.place))
    if len(done.vectors) != load.texts:
        raise Unavailable(f"vectors of shape {done.vectors.shape} for {load.texts} texts")
    firsts = np.cumsum([0, *map(len, load.requests)])
    rows = [first + at for first, checked in zip(firsts, result.checked, strict=False) for at in range(len(checked))]
    figures = ground.distance(done.vectors[rows])
    return Run(done.seconds, done.tokens, **figures, fetched=done.fetched, latencies=done.latencies)


def _file(load: Load, place: Path) -> Path:
    return kept(load.requests, place, f"requests-{load.name}")


def _over_http(asked: Asked, plan: RequestPlan, place: Path) -> None:
    loads = list(plan.over_http())
    # infinity's server only if it is asked for, since it is installed first.
    others = [INFINITY_SERVER] if asked.peers and {"all", "infinity", INFINITY_SERVER.name} & {*asked.peers} else []
    cells = [(name, hardware) for name in asked.models for hardware in asked.classes]
    steps = len(cells) * (2 * (2 + len(others)) + sum(rounds for _, rounds in loads))
    session = asked.session("request-http", steps, peers=requirements_digest())
    found: list[HttpResult] = []
    with suppress(KeyboardInterrupt), session:
        for name, hardware in cells:
            files = model_files(name, asked.settings)
            model = Model.in_folder(slug(name), files.folder)
            workload = make_workload("W1", _CHECKED, model, place)
            cpus = sorted(asked.cpus)
            reference = reference_of(model, workload, cpus, place)
            ground = Ground(f"{name}/{hardware}", model, workload, reference, cpus, place, session, asked.quick)
            systems = [gateway_of(hardware, asked.settings), direct_of(hardware, asked.settings), *others]
            contenders = [Contender(system, ground, lambda process: process.encode()) for system in systems]
            result = HttpResult(name, hardware, [load for load, _ in loads], [each.runs for each in contenders])
            found.append(result)
            with ExitStack() as stack:
                able = choose_settings(contenders, stack, session)
                for load, rounds in loads:
                    _by_turns(load, rounds, able, ground)
    conclude(http_report(found, asked), asked, session)


def _by_turns(load: Load, rounds: int, contenders: list[Contender], ground: Ground) -> None:
    file, key = _file(load, ground.place), f"{ground.key}/{load.name}"

    def run(contender: Contender) -> Run:
        figures = contender.accuracy()
        done = contender.process().requests(file, load.callers)
        return Run(done.seconds, done.tokens, **figures, latencies=done.latencies)

    if load.is_single and not ground.session.kept(f"{key}/{rounds}"):
        for contender in contenders:  # the first requests of a process take longer, and few would decide a percentile
            with suppress(EmbedctlError):  # its first turn says so
                contender.process().requests(file, load.callers)
    take_turns(contenders, run, load.name, rounds=rounds, repeats=0, session=ground.session, key=key)

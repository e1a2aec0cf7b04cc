"""The servers, which all run meanwhile, get each load by turns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.models import model_files, peers_folder
from embedctl_bench.measuring.session import Session
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.request.http.client import ask, vectors_of
from embedctl_bench.request.http.loads import Load, large, loads
from embedctl_bench.request.http.results import HttpResult, LoadResult, Turn
from embedctl_bench.request.http.servers import INFINITY, SERVERS, Server, Site
from embedctl_bench.request.results import RequestPlan
from embedctl_config.errors import EmbedctlError
from embedctl_workers.models.cache import private_folder

#: Vectors that are further from each other are of another model, or of another precision than promised.
_LEAST_COSINE = 0.999
#: Texts whose vectors are compared before anything is timed.
_CHECKED = 64


def measure(name: str, hardware: str, asked: Asked, session: Session) -> HttpResult:
    """All servers with one model and class; those that can't run are noted."""
    plan = RequestPlan.of(len(asked.cpus), quick=asked.quick)
    result = HttpResult(name, hardware)
    wanted = list(loads(plan, quick=asked.quick))
    with _on(asked.cpus), tempfile.TemporaryDirectory(prefix="embedctl-bench-") as folder, ExitStack() as stack:
        site = Site(
            asked.settings,
            hardware,
            model_files(name, asked.settings).folder,
            sorted(asked.cpus),
            private_folder(peers_folder(asked.settings)),
            Path(folder),
        )
        servers = _started(site, stack, asked.peers, result, session)
        servers = _alike(servers, wanted, site.model.name, result)
        for load in wanted:
            rounds = load.rounds(plan, quick=asked.quick)
            result.loads.append(_rounds(load, servers, rounds, result, site, session))
        if plan.once is not None:
            result.loads.append(_rounds(large(plan.once.sizes), servers, 1, result, site, session))
    return result


def steps(asked: Asked) -> int:
    """Steps of a session for one model and class."""
    plan = RequestPlan.of(len(asked.cpus), quick=asked.quick)
    rounds = sum(load.rounds(plan, quick=asked.quick) for load in loads(plan, quick=asked.quick))
    return len(_wanted(asked.peers)) * (rounds + (plan.once is not None))


@contextmanager
def _on(cpus: frozenset[int]) -> Iterator[None]:
    """This process, the callers in it and all processes that it starts meanwhile run on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wanted(peers: Sequence[str] | None) -> list[str]:
    """Names of the servers: infinity's only if it is asked for, since it is installed first."""
    takes_all = peers is not None and ("all" in peers or INFINITY in peers)
    return [each for each in SERVERS if each != INFINITY or takes_all]


def _started(
    site: Site, stack: ExitStack, peers: Sequence[str] | None, result: HttpResult, session: Session
) -> list[Server]:
    found: list[Server] = []
    for name in _wanted(peers):
        session.say(f"{result.name}: starting {name}")
        try:
            server = stack.enter_context(SERVERS[name](site))
        except EmbedctlError as error:
            result.failed[name] = str(error)
            continue
        found.append(server)
        result.labels[name], result.versions[name] = server.label, server.versions
    return found


def _alike(servers: Sequence[Server], wanted: Sequence[Load], model: str, result: HttpResult) -> list[Server]:
    """Those servers whose vectors are those of the first one; why another one is left out is noted."""
    texts = tuple(text for load in wanted for request in load.requests[:2] for text in request)[:_CHECKED]
    check = Load("check", "texts whose vectors are compared", 1, (texts,))
    first, alike = None, []
    for server in servers:
        try:
            vectors = vectors_of(ask(server.url, model, check).bodies)
        except Unavailable as error:
            result.failed[server.name] = str(error)
            continue
        first = vectors if first is None else first
        norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(first, axis=1)
        cosine = result.cosines[server.name] = float(((vectors * first).sum(axis=1) / norms).min())
        if cosine < _LEAST_COSINE:
            result.failed[server.name] = f"its vectors are others: least cosine {cosine:.4f}"
        else:
            alike.append(server)
    return alike


def _rounds(
    load: Load, servers: Sequence[Server], rounds: int, result: HttpResult, site: Site, session: Session
) -> LoadResult:
    found, able = LoadResult(load), list(servers)
    if load.is_single:  # the first requests of a process take longer, and a few of them would decide a percentile
        for server in servers:
            with suppress(Unavailable):  # its first turn says so
                ask(server.url, site.model.name, load)
    for number in range(rounds):
        at = number % max(1, len(able))
        for server in (*able[at:], *able[:at]):  # none is always the first one
            key = f"{result.name}/{result.hardware}/{load.name}/{server.name}/{number}"
            try:
                done = session.step(key, partial(_turn, server, load, site.model.name))
            except Unavailable as error:
                session.note(f"{server.label}: failed: {error}")
                able.remove(server)
                continue
            found.turns.setdefault(server.name, []).append(Turn(**done))
    return found


def _turn(server: Server, load: Load, model: str) -> dict[str, Any]:
    done = ask(server.url, model, load)
    count = len(vectors_of(done.bodies))
    if count != load.texts:
        raise Unavailable(f"{server.label}: {count} vectors for {load.texts} texts")
    return Turn(done.seconds, done.latencies).to_json()

"""`embedctl bench matrix`: batch × sequence × processes × concurrent requests, with cost, as AWS measures Neuron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import click

from embedctl_bench.asking import common, conclude
from embedctl_bench.matrix.report import report
from embedctl_bench.matrix.results import PRICE, MatrixCell, MatrixResult, MatrixScope
from embedctl_bench.measuring.accuracy import measure_accuracy
from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.cells import Bench, Case, seats_on
from embedctl_bench.measuring.models import model_files, peers_folder
from embedctl_bench.measuring.sampled import Effort, SampledProcesses
from embedctl_bench.measuring.shapes import describe
from embedctl_bench.measuring.texts import ExactTexts
from embedctl_bench.peers.registry import System, backend_of
from embedctl_config.errors import SettingsError

FULL = MatrixScope()
QUICK = MatrixScope((1, 16), (256,), (1, 2), (1, 2), Effort(seconds=1.0, least=2, most=40), rounds=2, repeats=0)


@click.command("matrix")
@common(price=PRICE)
def command(asked: Asked) -> None:
    """Batch × sequence × copies of the model × concurrent requests, with latency and cost.

    As AWS measures bge-base on Inferentia: batches of 1, 16 and 32, sequences of 256 and 512 tokens, one and two
    copies of the model, each on its share of the cores, and one and two concurrent requests to each copy. For the
    shape of the published model, use --model bge-base-shape.
    """
    scope = QUICK if asked.quick else FULL
    systems = [backend_of(name) for name in asked.classes]
    results: list[MatrixResult] = []
    plan = len(asked.models) * scope.steps(len(systems))
    with asked.session("matrix", plan) as session, SampledProcesses(peers_folder(asked.settings)) as processes:
        bench = Bench(asked, session, processes, scope.rounds, scope.repeats)
        try:
            for name in asked.models:
                results.append(MatrixResult(model_files(name, asked.settings), describe(name)))
                measure(bench, results[-1], systems, scope)
        except KeyboardInterrupt:
            session.stopped = True
    conclude(report(results, bench, scope), asked, session)


def measure(bench: Bench, result: MatrixResult, systems: Sequence[System], scope: MatrixScope) -> None:
    """Fill the result, cell by cell."""
    model = result.model
    exact = ExactTexts(model)
    longest: dict[System, int] = {}
    for system in systems:
        if facts := bench.facts(system, model):
            result.engines[system] = facts.engine
            longest[system] = facts.max_tokens
    result.accuracy = measure_accuracy(bench, model, result.engines)
    for copies in scope.models:
        try:
            seats = {system: seats_on(system, bench.asked, copies) for system in longest}
        except SettingsError as error:
            cells = len(scope.batches) * len(scope.sequences) * len(scope.workers) * len(longest)
            _skip(bench, scope, f"{model.name}: {copies} models", str(error), cells)
            continue
        bench.processes.keep({seat for each in seats.values() for seat in each}, model)
        for sequence, batch, workers in product(scope.sequences, scope.batches, scope.workers):
            able = [system for system in longest if longest[system] >= sequence]
            for system in longest.keys() - set(able):
                why = f"the model takes {longest[system]} tokens at most"
                _skip(bench, scope, f"{model.name}, {system.name}: sequence {sequence}", why)
            requests = exact.requests(sequence, batch, max(4, 64 // batch))
            effort = replace(scope.effort, workers=workers)
            cases = {system.name: Case(system, seats[system], requests, effort) for system in able}
            key = f"{copies} models/{workers} workers/sequence {sequence}/batch {batch}"
            found = bench.measure(key, model, cases)
            result.cells += [
                MatrixCell(cases[name].system, copies, workers, sequence, each) for name, each in found.items()
            ]


def _skip(bench: Bench, scope: MatrixScope, what: str, why: str, cells: int = 1) -> None:
    bench.skip(what, why, cells)
    bench.session.more(-cells * scope.rounds)

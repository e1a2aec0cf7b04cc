"""`embedctl bench engines`: embedding engines side by side: ours, others, and matrix products alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import click

from embedctl_bench.asking import Asked, common, conclude
from embedctl_bench.engines.idle import gpu_samples
from embedctl_bench.engines.report import EnginesResult, report
from embedctl_bench.measuring.comparison import Run
from embedctl_bench.measuring.contenders import Contender, Ground, choose_settings, take_turns
from embedctl_bench.measuring.session import Session
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.environments import requirements_digest
from embedctl_bench.peers.models import Model, describe, measured_model, peers_folder
from embedctl_bench.peers.registry import (
    AT_ITS_DEFAULT,
    FLOORS,
    GPU_FLOOR,
    System,
    baselines_for,
    choose_peers,
    engine_of,
    on_gpu,
    product_of,
)
from embedctl_bench.peers.tuned import TunedProcess, reference_of
from embedctl_bench.texts.workloads import describe_workload, make_workload
from embedctl_config.errors import SettingsError
from embedctl_workers.models.cache import private_folder

#: Texts of each workload for all-MiniLM-L6-v2, and with --quick; on an accelerator, for every model.
COUNTS = {"W1": (2048, 256), "W2": (192, 24)}
DEVICE_COUNTS = {"W1": (8192, 256), "W2": (1024, 24)}
ROUNDS, QUICK_ROUNDS = 5, 2
#: On an accelerator, texts are repeated until a measurement takes so long (seconds).
_DEVICE_S, _QUICK_DEVICE_S = 4.0, 0.5
_FLOORS = {floor.name for floor in (*FLOORS.values(), GPU_FLOOR)}
#: Numbers of workers of our product: no more than the processes that the other systems choose from.
WORKERS = (1, 2)
#: Operations of all-MiniLM-L6-v2 for one token. A larger model gets fewer texts in proportion, so that work is equal.
_MINILM_FLOPS = 2.0 * 6 * 384 * (4 * 384 + 2 * 1536)


@click.command("engines")
@common
@click.option(
    "--workload",
    "workloads",
    type=click.Choice(list(COUNTS)),
    multiple=True,
    default=tuple(COUNTS),
    show_default=True,
    help="The texts: W1 has mixed lengths of up to 256 tokens, W2 has long texts of 443 to 449. Can be repeated.",
)
def command(asked: Asked, workloads: tuple[str, ...]) -> None:
    """Engines side by side: embedctl and other systems.

    Compares embedctl's engines called directly, embedctl end to end, other systems, and matrix products alone. Each
    system uses the setting that was fastest for it on a sample. All encode the same texts on the same CPUs, in turn, in
    five rounds. Ratios are relative to sentence-transformers on torch in fp32. With --class gpu, sentence-transformers
    runs on the same GPU, and one long job shows how idle the GPU is.
    """
    place = private_folder(peers_folder(asked.settings))
    peers, uninstalled = peers_for(asked, place)
    rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    systems = systems_for(asked, peers)
    plan = len(asked.models) * len(workloads) * (len(floors_for(systems, asked)) + len(systems) + rounds)
    session = asked.session("engines", plan, peers=requirements_digest())
    found: list[EnginesResult] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            model = measured_model(name, asked.settings, place)
            for workload_name in dict.fromkeys(workloads):
                count = count_of(workload_name, model, quick=asked.quick, device=asked.device)
                workload = make_workload(workload_name, count, model, place)
                if asked.device != "cpu":
                    # A duplicate in a chunk is encoded once, so no chunk may hold a text and its repetition.
                    workload = replace(workload, chunk=min(asked.settings.chunk_size, len(workload.lengths)))
                result = EnginesResult(name, describe(name), model, workload, rounds, uninstalled)
                found.append(result)
                measure(ground(result, asked, place, session), systems, floors_for(systems, asked), result)
    conclude(report(found, asked), asked, session)


def peers_for(asked: Asked, place: Path) -> tuple[list[System], list[str]]:
    """The peers, all of which run on CPUs, and the names of those that are not installed.

    Raises:
        SettingsError: there is no such peer, or peers are asked for beside a class of accelerators.
    """
    if asked.device == "cpu":
        return choose_peers(asked.peers, place)
    if asked.peers:
        raise SettingsError(f"--peers: they run on CPUs, and {', '.join(asked.classes)} does not")
    return [], []


def systems_for(asked: Asked, peers: Sequence[System]) -> list[System]:
    """The systems to rank: sentence-transformers of our own environment, where the peers lack it; peers; ours.

    Raises:
        SettingsError: there is no such class.
    """
    engines = [engine_of(name, asked.settings) for name in asked.classes]
    products = [product_of(name, asked.settings, len(asked.cpus), WORKERS) for name in asked.classes]
    baselines = baselines_for(products, peers)
    if asked.device == "gpu":
        baselines = [on_gpu(each) for each in baselines]
    return [*baselines, *peers, *engines, *products]


def floors_for(systems: Sequence[System], asked: Asked) -> list[System]:
    """The floors of the precisions that systems promise; one at its default may promise 16 bits."""
    if asked.device != "cpu":
        return [GPU_FLOOR] if asked.device == "gpu" else []
    wanted = {"fp16" if system.precision == AT_ITS_DEFAULT else system.precision for system in systems}
    return [floor for precision, floor in FLOORS.items() if precision in wanted]


def count_of(workload: str, model: Model, *, quick: bool = False, device: str = "cpu") -> int:
    """The number of texts of a workload for a model, one at least."""
    if device != "cpu":
        return DEVICE_COUNTS[workload][quick]
    return max(1, round(COUNTS[workload][quick] * min(1.0, _MINILM_FLOPS / model.flops_per_token)))


def ground(result: EnginesResult, asked: Asked, place: Path, session: Session) -> Ground:
    """What all systems have in common on one model and workload; computes the reference unless it is kept.

    Raises:
        Unavailable: the reference can't be computed.
    """
    model, workload, cpus = result.model, result.workload, sorted(asked.cpus)
    session.say(f"{result.name}, {describe_workload(workload)}")
    on_device = asked.device != "cpu"
    reference = reference_of(model, workload, cpus, place, "cuda" if asked.device == "gpu" else "cpu")
    key = f"{model.name}/{workload.name} {workload.digest}"
    return Ground(key, model, workload, reference, cpus, place, session, asked.quick, whole=on_device)


@dataclass
class Passes:
    """How often each system encodes the texts in one measurement, and the measurement itself.

    Attributes:
        seconds: how long a measurement is to take at least; 0 for one pass.
    """

    ground: Ground
    seconds: float
    repeats: dict[str, int] = field(default_factory=dict)

    def warm_up(self, system: System) -> Callable[[TunedProcess], None]:
        """Encode everything once, or twice on an accelerator, whose first pass says little."""

        def encode(process: TunedProcess) -> None:
            process.encode()
            if self.seconds and system != GPU_FLOOR:  # its seconds are computed, so repeating them changes nothing
                self.repeats[system.name] = max(1, math.ceil(self.seconds / process.encode().seconds))

        return encode

    def run(self, contender: Contender) -> Run:
        """A run, its vectors compared with the reference; a floor makes none.

        Raises:
            Unavailable: it failed, or the vectors are not those of the texts.
        """
        process, name = contender.process(), contender.runs.name
        repeat = self.repeats.get(name, 1)
        done = process.encode(repeat)
        run = Run(done.seconds / repeat, done.tokens // repeat)
        return run if name in _FLOORS else replace(run, **self.ground.distance(done.vectors))


def measure(ground: Ground, systems: Sequence[System], floors: Sequence[System], result: EnginesResult) -> None:
    """Let every system choose its setting, then measure the systems and the floors round by round."""
    load, on_device = result.workload.name, ground.whole
    passes = Passes(ground, (_QUICK_DEVICE_S if ground.quick else _DEVICE_S) if on_device else 0.0)
    with ExitStack() as stack:
        contenders = [Contender(system, ground, passes.warm_up(system)) for system in (*floors, *systems)]
        result.runs = [contender.runs for contender in contenders]
        able = choose_settings(contenders, stack, ground.session)
        take_turns(able, passes.run, load, rounds=result.rounds, repeats=0, session=ground.session, key=ground.key)
        for contender in able if on_device else ():
            name = contender.runs.name
            if contender.runs.ours and not name.startswith("embedctl-engine"):
                with suppress(Unavailable):  # its rounds say why
                    idle = partial(_idle, contender, passes)
                    result.idle[contender.runs.label] = ground.session.step(f"{ground.key}/idle/{name}", idle)


def _idle(contender: Contender, passes: Passes) -> tuple[float | None, str]:
    """The share of time during which the GPU was idle in a job three times as long; and what says so."""
    process = contender.process()
    edge_s = passes.seconds / 4  # at both ends, the queue is not full, or the driver's samples lag
    with gpu_samples() as samples:
        done = process.encode(3 * passes.repeats.get(contender.runs.name, 1))
    return samples.idle(done.began + edge_s, done.ended - edge_s), samples.what

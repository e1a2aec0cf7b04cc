"""`embedctl bench engines`: embedding engines side by side: ours, others, and matrix products alone."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from math import nan
from statistics import fmean, median

import click

from embedctl_bench.asking import Asked, common, conclude, not_installed
from embedctl_bench.measuring.comparison import Load, Scene, each_scene, in_words
from embedctl_bench.measuring.contenders import Contender, compete
from embedctl_bench.peers.models import Model, describe, measured_model
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
from embedctl_bench.peers.tuned import Run, Workload
from embedctl_bench.report import Report
from embedctl_bench.texts.workloads import describe_workload, make_workload
from embedctl_config.errors import SettingsError

#: Texts of each workload for all-MiniLM-L6-v2, and with --quick; on an accelerator, for every model.
COUNTS = {"W1": (2048, 256), "W2": (192, 24)}
DEVICE_COUNTS = {"W1": (8192, 256), "W2": (1024, 24)}
ROUNDS, QUICK_ROUNDS = 5, 2
#: On an accelerator, texts are repeated until a measurement takes so long (seconds).
_DEVICE_S, _QUICK_DEVICE_S = 4.0, 0.5
#: Numbers of workers of our product: no more than the processes that the other systems choose from.
WORKERS = (1, 2)
#: Operations of all-MiniLM-L6-v2 for one token. A larger model gets fewer texts in proportion, so that work is equal.
_MINILM_FLOPS = 2.0 * 6 * 384 * (4 * 384 + 2 * 1536)
#: The whole product overlaps tokenising with encoding. A larger multiple of its engine's rate is a fault of the run.
_MOST_SHARE = 1.1
_GPU_EVERY_MS = 100


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
    runs on the same GPU, and the share of time is shown during which the GPU was idle.
    """
    peers, lacking = peers_for(asked)
    systems = systems_for(asked, peers)
    rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    session = asked.session("engines", len(asked.models) * len(workloads) * (len(systems) + rounds))
    scenes: list[Scene] = []
    with suppress(KeyboardInterrupt), session:
        for name in asked.models:
            model = measured_model(name, asked.settings, asked.place)
            for workload_name in dict.fromkeys(workloads):
                workload = _workload_of(workload_name, model, asked)
                shown = f"{describe(name)}, {describe_workload(workload, model.max_tokens)}, {rounds} rounds"
                loads = [Load(workload.name, rounds, len(workload.lengths))]
                scenes.append(Scene(f"{name}, {workload.name}", model, shown, loads))
                least_s = 0.0 if asked.device == "cpu" else _QUICK_DEVICE_S if asked.quick else _DEVICE_S
                key = f"{model.name}/{workload.name} {workload.digest}"
                ground = asked.ground(key, model, workload, session, least_s=least_s)
                compete(scenes[-1], systems, ground, run_on(asked, least_s))
    report = Report(
        "Embedding engines, side by side",
        "Paragraphs of Python's own docstrings, the same texts for every system. W1 has lengths as in real corpora; W2 "
        "has long texts. On CPUs, a model larger than all-MiniLM-L6-v2 gets fewer texts in proportion. A time is from "
        "the texts to their float32 vectors, tokenising included; for the whole product, from its first claim to the "
        "last vector stored.",
        notes=[*not_installed(lacking), *each_scene(scenes, notes_of)],
    )
    conclude(asked, session, scenes, report)


def _workload_of(name: str, model: Model, asked: Asked) -> Workload:
    count = count_of(name, model, quick=asked.quick, device=asked.device)
    workload = make_workload(name, count, model, asked.place)
    if asked.device == "cpu":
        return workload
    # A duplicate in a chunk is encoded once, so no chunk may hold a text and its repetition.
    return replace(workload, chunk=min(asked.settings.chunk_size, len(workload.lengths)))


def peers_for(asked: Asked) -> tuple[list[System], list[str]]:
    """The peers, all of which run on CPUs, and the names of those not installed; SettingsError if none can run."""
    if asked.device == "cpu":
        return choose_peers(asked.peers, asked.place)
    if asked.peers:
        raise SettingsError(f"--peers: they run on CPUs, and {', '.join(asked.classes)} does not")
    return [], []


def systems_for(asked: Asked, peers: Sequence[System]) -> list[System]:
    """The floors of all precisions; sentence-transformers of our environment, where peers lack it; peers; ours."""
    engines = [engine_of(name, asked.settings) for name in asked.classes]
    products = [product_of(name, asked.settings, len(asked.cpus), WORKERS) for name in asked.classes]
    baselines = baselines_for(products, peers)
    if asked.device == "gpu":
        baselines = [on_gpu(each) for each in baselines]
    systems = [*baselines, *peers, *engines, *products]
    if asked.device != "cpu":
        return [*([GPU_FLOOR] if asked.device == "gpu" else []), *systems]
    # A system at its default may promise 16 bits.
    wanted = {"fp16" if system.precision == AT_ITS_DEFAULT else system.precision for system in systems}
    return [*(each for each in FLOORS if each.precision in wanted), *systems]


def count_of(workload: str, model: Model, *, quick: bool = False, device: str = "cpu") -> int:
    """The number of texts of a workload for a model, one at least."""
    if device != "cpu":
        return DEVICE_COUNTS[workload][quick]
    return max(1, round(COUNTS[workload][quick] * min(1.0, _MINILM_FLOPS / model.flops_per_token)))


def run_on(asked: Asked, least_s: float) -> Callable[[Load, Contender], Run]:
    """Encode all texts, and see meanwhile how idle a GPU is."""

    def run(_: Load, contender: Contender) -> Run:
        process, repeat, idle = contender.process(), contender.repeat, nan
        if asked.device == "gpu":
            with gpu_idle() as between:
                done = process.encode(repeat)
            edge_s = least_s / 4  # at both ends, the queue is not full, or the driver's samples lag
            since_1970 = time.time() - time.monotonic()
            idle = between(since_1970 + done.began + edge_s, since_1970 + done.ended - edge_s)
        else:
            done = process.encode(repeat)
        return Run((done.ended - done.began) / repeat, done.tokens // repeat, idle=idle)

    return run


@contextmanager
def gpu_idle() -> Iterator[Callable[[float, float], float]]:
    """See ten times a second how busy the GPU is that this process sees, with all processes.

    Yields:
        A function, to be called when the block has ended: the share of the time between two moments (seconds since
        1970) during which no kernel ran, as the driver tells it; NaN if it does not, as on a part of a GPU.
    """
    query = ["nvidia-smi", f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '0')}", f"--loop-ms={_GPU_EVERY_MS}"]
    query += ["--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits"]
    busy: list[tuple[float, float]] = []
    with tempfile.TemporaryFile("w+") as said:
        try:
            tool = subprocess.Popen(query, stdout=said)
        except OSError:  # there is no such tool
            tool = None
        yield lambda began, ended: fmean([1 - share for at, share in busy if began <= at <= ended] or [nan])
        if tool:
            tool.terminate()
            tool.wait()
            said.seek(0)
            busy += _busy_shares(said)


def _busy_shares(lines: Iterable[str]) -> Iterator[tuple[float, float]]:
    """What nvidia-smi says: moments (seconds since 1970), and the share of the time before each that was not idle."""
    for line in lines:
        at, _, percent = line.partition(", ")
        with suppress(ValueError):  # "[N/A]", or a line that was cut
            yield datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(percent) / 100


def notes_of(scene: Scene) -> Iterator[str]:
    """For each class, the whole product's rate as a multiple of its engine's."""
    for comparison in scene.measured():
        for product in comparison.systems:
            engine = comparison.find(product.name.replace("embedctl-", "embedctl-engine-", 1))
            shares = product.ratios(engine) if engine and product.ours else []
            if shares:
                yield f"{comparison.where}: {product.label} has {in_words(shares)} × the rate of its engine alone."
            if shares and median(shares) > _MOST_SHARE:
                yield f"**Not to be trusted: {comparison.where}**, because it can't be faster than its own engine."

"""The command line of a worker. Imports nothing that starts threads: pinning comes first."""

from __future__ import annotations

import gc
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

import click

from embedctl.queueing.broker import Broker
from embedctl_config.command_group import one_line_errors, option
from embedctl_config.errors import WorkerError
from embedctl_config.hardware import MOST_WORKERS
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from embedctl_workers.commands.options import (
    cpus_option,
    gpu_option,
    log_level_option,
    neuron_core_option,
    pooling_option,
    pull_option,
    with_pooling,
)
from embedctl_workers.machine import devices
from embedctl_workers.machine.discovery import choose_accelerator, choose_sharing


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@option(
    "--class",
    "hardware",
    help="The hardware class to serve. Default: the setting, or cpu if that is auto.",
)
@cpus_option
@gpu_option
@neuron_core_option
@option(
    "--gpu-workers",
    type=click.IntRange(1, MOST_WORKERS),
    metavar="N",
    help="How many workers run on this GPU, this one included: it takes 1/N of the GPU's memory. Default: the class's "
    "workers_per_device, or 1.",
)
@option(
    "--threads",
    type=click.IntRange(1),
    metavar="N",
    help="The number of compute threads. Default: one per physical core of its CPUs, within the cgroup's quota.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    help="A model to serve. Can be repeated. Default: the models of the class, else the setting.",
)
@option(
    "--no-build",
    is_flag=True,
    help="Refuse to start if a model needs something built first; see `embedctl model build`.",
)
@pull_option
@pooling_option
@log_level_option
@click.option("--quarantine", is_flag=True, hidden=True, help="Take what may kill a worker, and nothing else.")
@click.option("--tally", type=int, hidden=True, help="A descriptor of the file that tells the supervisor what is held.")
@option(
    "--ready",
    is_flag=True,
    help="Start nothing; exit with 0 if the workers on this machine are alive and making progress.",
)
@one_line_errors("embedctl worker")
def main(
    hardware: str | None,
    cpus: str | None,
    gpu: str | None,
    neuron_core: int | None,
    gpu_workers: int | None,
    threads: int | None,
    models: tuple[str, ...],
    pooling: str | None,
    log_level: str,
    tally: int | None,
    *,
    no_build: bool,
    pull: bool,
    quarantine: bool,
    ready: bool,
) -> None:
    """Encode chunks of one hardware class until stopped.

    The worker is pinned to one set of CPUs and, if its class needs one, to a GPU or Neuron core. It needs
    EMBEDCTL_REDIS_URL. Stop it with SIGTERM: it finishes the chunk that it is encoding and hands back the one that it
    has prepared.
    """
    settings = load_settings()
    hardware = "cpu" if hardware == "auto" else hardware
    if ready:
        click.echo(f"ready: {', '.join(check_ready(settings, hardware))}")
        return
    hardware = hardware or (settings.hardware if settings.hardware != "auto" else "cpu")
    entry = settings.hardware_class(hardware)
    accelerator = choose_accelerator(hardware, entry.device, gpu=gpu, neuron_core=neuron_core)
    sharing = choose_sharing(hardware, entry, gpu_workers)
    pinned = devices.pin(cpus, accelerator=accelerator, threads=threads, sharing=sharing)
    gc.disable()  # until the models are loaded: it would look through all of them for garbage again and again
    # Only now: these import numpy and, through the backend, torch, which size their thread pools as they load.
    from embedctl_workers.serving.lifecycle import Start, Supervised, run_worker

    served = models or entry.models or (settings.model,)
    settings = with_pooling(settings, served, pooling)
    supervised = Supervised(tally, quarantine)
    start = Start(settings, hardware, served, pinned, log_level, build=not no_build, pull=pull, supervised=supervised)
    _exit(run_worker(start))


def _exit(status: int) -> NoReturn:
    """End the process at once. The worker has said good-bye, and Python would take torch apart for a second or two."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may read it any more
            stream.flush()
    os._exit(status)


def check_ready(settings: Settings, hardware: str | None) -> list[str]:
    """The names of the workers that run here, of a class or, for None, of any.

    A WorkerError if there is no live one, or one makes no progress; BrokerUnavailable if Redis can't be reached.
    """
    broker = Broker.connect(settings)
    try:
        found = [row for row in broker.workers.here() if hardware in (None, row.hardware) and not row.quarantine]
    finally:
        broker.close()
    if not found:
        raise WorkerError(f"no live worker{f' of class {hardware}' if hardware else ''} on this machine")
    for row in found:
        if row.activity == "hung":
            raise WorkerError(f"{row.name} has finished no batch for {row.quiet_s:.0f} s")
    return [row.name for row in found]

"""`embedctl model tune`: how many workers are fastest on some CPUs, or on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import click

from embedctl_config.errors import SettingsError
from embedctl_workers.commands.options import (
    class_option,
    cpus_option,
    gpu_option,
    json_option,
    plural,
    settings_and_class,
)
from embedctl_workers.machine.discovery import choose_accelerator
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.tuning import save_tuned


@click.command()
@click.argument("model")
@class_option("cpu")
@cpus_option
@gpu_option
@json_option
def tune(model: str, hardware: str | None, cpus: str | None, gpu: str | None, *, as_json: bool) -> None:
    """Find how many workers run MODEL fastest.

    Measures 1, 2, 4, … workers that divide the CPUs, as long as more are faster, tokenising included; for a class on
    GPUs, up to 8 workers on one GPU, on which nothing else should run meanwhile. Each number takes up to a minute, and
    the time to load the model.

    `embedctl up` starts the number that was fastest, unless the class sets `workers_per_device`. By default, workers on
    a GPU divide the CPUs that `embedctl up` gives to it.
    """
    settings, name = settings_and_class(hardware, "cpu")
    entry = settings.hardware_class(name)
    if entry.device == "neuron":
        raise SettingsError(f"class {name} runs one worker on each Neuron core: there is nothing to tune")
    accelerator = choose_accelerator(name, entry.device, gpu=gpu)
    say: Callable[[str], None] = (lambda line: None) if as_json else click.echo  # one JSON value is the only output
    from embedctl_workers.commands.tune_search import search  # it imports embedctl, and NumPy with it

    best = search(settings, name, model, accelerator, cpus, say)
    save_tuned(best.tuned, entry, best.fingerprint, cache_folder(settings), accelerator)
    kind = f" on GPUs like this one with {plural(best.cpus, 'CPU')}" if accelerator else ""
    say(f"best: {plural(len(best.workers), 'worker')}{kind}. Start:")
    for worker in best.workers:
        say(f"  {worker.command}")
    if entry.workers_per_device:
        say(f"[classes.{name}] sets workers_per_device = {entry.workers_per_device}, which `embedctl up` follows")
    if as_json:
        click.echo(json.dumps(asdict(best.tuned)))

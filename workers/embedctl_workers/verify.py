"""`embedctl model verify`: what the gate of a worker's start would say."""

from __future__ import annotations

import json
import logging

import click

from embedctl_config.errors import GateFailed, ModelError
from embedctl_config.settings import load_settings
from embedctl_workers import devices
from embedctl_workers.options import class_option, cpus_option, json_option


@click.command()
@click.argument("model")
@class_option("cpu")
@cpus_option
@json_option
@click.pass_context
def verify(ctx: click.Context, /, model: str, hardware: str | None, cpus: str | None, *, as_json: bool) -> None:
    """Load MODEL as a worker would, and compare its vectors with those of torch in fp32.

    Exits with 65 where a worker would refuse to start.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("embedctl_workers").setLevel(logging.INFO)
    settings = load_settings(hardware=hardware)
    name = "cpu" if settings.hardware == "auto" else settings.hardware
    entry = settings.hardware_class(name)
    pinned = devices.pin(cpus)
    # Only now: these import what sizes its thread pools as it loads.
    from embedctl_workers.backends.base import Host
    from embedctl_workers.cache import cache_folder
    from embedctl_workers.gate import measure_backend
    from embedctl_workers.loading import load_encoder

    host = Host(pinned.threads, cache_folder(settings))
    encoder = load_encoder(settings, entry, model, host)
    try:
        report = measure_backend(encoder, entry, host)
    finally:
        encoder.backend.close()
    if report is None:
        raise ModelError(f"the backend {entry.backend!r} of class {name} runs no model: there is nothing to compare")
    click.echo(json.dumps(report.as_json()) if as_json else str(report))
    ctx.exit(0 if report.passed else GateFailed.exit_code)

"""`embedctl up`: a worker on each device of this machine, kept alive."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import click

from embedctl.operating.local import private_redis, state_of
from embedctl.queueing.broker import Broker
from embedctl_config.command_group import one_line_errors, option
from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.loading import load_settings
from embedctl_config.redis_url import secret_url
from embedctl_config.settings import ENV_PREFIX, Settings
from embedctl_workers.commands.options import log_level_option, pooling_option, pull_option, with_pooling
from embedctl_workers.machine.devices import Accelerator, format_cpus
from embedctl_workers.machine.discovery import discover
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.files import resolve_model
from embedctl_workers.models.tuning import advised_workers
from embedctl_workers.serving import logs
from embedctl_workers.supervising.places import GatewayPlace, QuarantinePlace, WorkerPlace
from embedctl_workers.supervising.plan import Plan, make_plan, with_gateway
from embedctl_workers.supervising.registry_link import RegistryLink
from embedctl_workers.supervising.supervisor import Supervisor

log = logging.getLogger("embedctl_workers.up")

#: Variables of `embedctl worker` that must not apply to all workers: the plan sets these options for each.
_OF_ONE_WORKER = frozenset(
    ENV_PREFIX + name for name in ("CPUS", "GPU", "GPU_WORKERS", "NEURON_CORE", "READY", "THREADS")
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--class",
    "classes",
    multiple=True,
    help="A hardware class to serve. Can be repeated. Default: the setting. If that is auto: the class for this "
    "machine's GPUs or Neuron cores, or cpu if it has neither.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    help="A model to serve. Can be repeated. Default: the models of each class, else the setting.",
)
@option("--cpus", help="CPUs that the workers share, such as 0-3. Default: all.")
@option(
    "--gateway",
    is_flag=True,
    help="Also answer requests over HTTP, as `embedctl gateway` does with its settings. Needs the extra `gateway`.",
)
@option("--dry-run", is_flag=True, help="Only print the plan: one line per worker.")
@pull_option
@pooling_option
@log_level_option
@one_line_errors("embedctl up")
def main(
    classes: tuple[str, ...],
    models: tuple[str, ...],
    cpus: str | None,
    pooling: str | None,
    log_level: str,
    *,
    gateway: bool,
    dry_run: bool,
    pull: bool,
) -> None:
    """Keep a worker running on each device of this machine until stopped with SIGTERM or Ctrl-C.

    A worker that dies is started again. If EMBEDCTL_REDIS_URL is not set, a private Redis runs as well. In that
    case, an `export` line is printed when the workers are ready. Run the line in another shell, so that commands and
    programs there use the private Redis.
    """
    settings = load_settings()
    logs.configure(settings.log_format, log_level)
    plan = make_plan(
        settings,
        discover(cpus),
        classes=classes,
        models=models,
        advice=lambda hardware, served, *place: workers_as_tuned(
            with_pooling(settings, served, pooling), hardware, served, *place
        ),
    )
    asked = (*(("--pull",) if pull else ()), *(("--pooling", pooling) if pooling else ()))
    plan = replace(plan, workers=[replace(each, asked=asked) for each in plan.workers])
    if gateway:
        _check_user(settings)
        plan = with_gateway(plan, settings)
    for note in plan.notes:
        log.warning("%s", note)
    if dry_run:
        click.echo(str(plan))
    else:
        _up(settings, plan, ("--log-level", log_level))


def _up(settings: Settings, plan: Plan, options: Sequence[str]) -> None:
    """Run the workers of a plan, with these options, until told to stop; raises as :meth:`Supervisor.run`.

    A WorkerError if the gateway can't start, MissingExtra if no redis-server is installed.
    """
    own = {name: value for name, value in os.environ.items() if name not in _OF_ONE_WORKER}
    with _redis(settings) as (ours, check):
        if private := ours is not settings:
            own |= {"EMBEDCTL_REDIS_URL": ours.redis_url, "EMBEDCTL_REDIS_PASSWORD_FILE": ""}
        broker = Broker.connect(ours)
        broker.connection.now_ms()  # so that nothing is started if the URL or the password is wrong
        gateway = _started_gateway(settings, {**own, **plan.gateway.environment}) if plan.gateway else None
        registry = RegistryLink(broker)

        def say_ready() -> None:
            if private:
                log.info("running; stop with Ctrl-C. In another terminal: the line below, then embedctl submit …")
                click.echo(f"export EMBEDCTL_REDIS_URL={ours.redis_url}")
            else:
                log.info("running")

        try:
            # One quarantine for the workers that serve the same, whatever their number.
            quarantines = {
                (each.hardware, each.models): QuarantinePlace(each, registry, environment=own, options=options)
                for each in reversed(plan.workers)
            }
            workers = [
                WorkerPlace(
                    each,
                    registry,
                    environment=own,
                    options=options,
                    quarantine=quarantines[each.hardware, each.models],
                )
                for each in plan.workers
            ]
            beside = list(quarantines.values())
            Supervisor(workers, on_ready=say_ready, check=check, gateway=gateway, quarantines=beside).run()
        finally:
            registry.close()
            broker.close()


def _check_user(settings: Settings) -> None:
    """See that the user of Redis may also submit jobs; a SettingsError if it is the workers' own user, who may not."""
    if settings.redis_url and urlsplit(secret_url(settings)).username == "worker":
        raise SettingsError(
            "--gateway: Redis' user worker may not submit jobs, as a gateway does: leave --gateway out, and run "
            "`embedctl gateway` as the user producer"
        )


def _started_gateway(settings: Settings, environment: Mapping[str, str]) -> GatewayPlace:
    # A gateway needs a little longer to end than its requests.
    gateway = GatewayPlace(environment, grace_s=settings.gateway_timeout_s + 15)
    gateway.start_first()
    return gateway


@contextmanager
def _redis(settings: Settings) -> Iterator[tuple[Settings, Callable[[], None]]]:
    """A context with the Redis of these settings, or a private one; and a check that the private one lives.

    The data of a private Redis is removed when the block ends without an error; otherwise the next call finds it.
    """
    if settings.redis_url:
        yield settings, lambda: None
        return
    with state_of(settings, "up") as folder:
        with private_redis(settings, folder) as (ours, check):
            yield ours, check
        shutil.rmtree(folder, ignore_errors=True)


def workers_as_tuned(
    settings: Settings,
    hardware: str,
    models: Sequence[str],
    cpus: frozenset[int],
    accelerator: Accelerator | None = None,
) -> int:
    """The best number of workers on these CPUs, and on an accelerator, from `embedctl model tune`.

    It is the smallest number of all models, because each worker costs memory.
    """
    cache, entry = cache_folder(settings), settings.hardware_class(hardware)

    def of(model: str) -> int:
        try:
            fingerprint = resolve_model(model, settings.models.get(model), plain=False).fingerprint
        except (ModelError, ImportError, OSError):  # its worker will report what is wrong
            return 1
        return advised_workers(entry, fingerprint, cpus=len(cpus), cache=cache, accelerator=accelerator)

    found = min(map(of, models)) if any((cache / "tuned").glob("*.json")) else 1
    if found > 1:
        where = f"{accelerator.kind} {accelerator.uid}" if accelerator else f"CPUs {format_cpus(cpus)}"
        log.info("%d workers of class %s on %s, as `embedctl model tune` found", found, hardware, where)
    return found


if __name__ == "__main__":
    main(prog_name="embedctl up")

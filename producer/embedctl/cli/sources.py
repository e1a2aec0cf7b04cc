"""Vectors that need not be encoded: which earlier output and which cache a command may copy from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedctl.cli.job_command import JobCommand
from embedctl.destinations.interface import Contract
from embedctl.jobs.enqueue import job_spec
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import model_files, same_model
from embedctl.store import JobSpec
from embedctl.sync.earlier import open_earlier
from embedctl.sync.known import Earlier
from embedctl.sync.merged import Sources
from embedctl_config.fingerprint import deciding

if TYPE_CHECKING:
    from embedctl.sync.cache import Cache

Say = Callable[[str], None]


def opened_cache(broker: Broker | None, command: JobCommand) -> AbstractContextManager[Cache | None]:
    """The cache that a command names, if there is one and a Redis; a context manager."""
    if broker is None or command.sync.cache is None:
        return nullcontext()
    from embedctl.sync.cache import Cache  # here, because most commands have none

    return Cache(command.sync.cache, broker.settings.cache_max_bytes)


def earlier_of(command: JobCommand, path: Path, say: Say) -> Earlier | None:
    """The earlier output, if it is asked for, and there."""
    if not command.sync.of_file:
        return None
    found = open_earlier(path, command.destination.numbers)
    if found is None:
        say(f"{path} is not there yet, or not whole: all records are new")
    return found


def sources_of(broker: Broker, command: JobCommand, path: Path, cache: Cache | None, say: Say) -> Sources:
    """Open what may have vectors, and see which of it has those of this job."""
    spec = job_spec(broker, command.choice.options)
    models = model_files(broker.settings, broker.workers, spec)
    about = Contract.of(spec, model=next(iter(models))) if len(models) == 1 else None
    confirmed = about is not None
    earlier = earlier_of(command, path, say)
    if earlier is not None and (why_not := _differs(earlier.about, broker, spec, models)):
        say(f"{earlier.name} is not used, because {why_not}: all records are encoded")
        earlier = None
    about = about if earlier is None else earlier.about
    if cache is None:
        return Sources(earlier, None, about, confirmed)
    if about is None:
        say(f"The cache is not read, because no live worker tells which files model {spec.model} has")
        return Sources(earlier, None, about, confirmed)
    from embedctl.sync.cache import Cached

    return Sources(earlier, Cached(cache, about.fingerprint, spec.precision), about, confirmed)


def _differs(about: Contract, broker: Broker, spec: JobSpec, models: frozenset[str]) -> str:
    """Why the vectors of an output are others than those of a job whose model has files with these fingerprints, in
    words; empty if nothing says so."""
    mine: Mapping[str, Any] = deciding(spec.options)
    options = sorted(name for name in mine.keys() | about.options.keys() if mine.get(name) != about.options.get(name))
    if options:
        return f"it was made with another {options[0]}"
    if about.precision != spec.precision:
        return f"its vectors promise {about.precision}, not {spec.precision}"
    if models and about.model_fingerprint not in models:
        return "it was made with other weights, or another tokenizer or pooling"
    if not models and not same_model(broker.settings, broker.workers, about.model, spec.model):
        return f"it was made with model {about.model}, not {spec.model}"
    return ""

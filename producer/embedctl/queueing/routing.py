"""Chooses the hardware class of a job, once, at submit."""

from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache

from embedctl.common.notices import Reminder
from embedctl.queueing.chunk_sizes import ReadAhead, Workers, chunk_bytes
from embedctl.store import JobSpec, JobStatus, WorkerRegistry
from embedctl.store.refusals import MAKE_ROOM
from embedctl.store.workers import Offer, Offered
from embedctl_config import keys
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import PRECISIONS, HardwareClass
from embedctl_config.model_names import did_you_mean, near_names, other_spelling
from embedctl_config.outputs import asked_by, not_given
from embedctl_config.settings import Settings

log = logging.getLogger(__name__)

#: The class of a job if `auto` finds no worker.
FALLBACK_CLASS = "cpu"
#: Most workers that are named because they are not ready.
_STARTING_SHOWN = 3


def resolve(
    settings: Settings,
    workers: WorkerRegistry,
    *,
    model: str,
    hardware: str,
    precision: str | None,
) -> tuple[str, str]:
    """The hardware class and the precision of a job.

    `auto` considers the classes with a live worker that serves this model in this precision (fp32 if none is given). It
    chooses the class whose workers together encode the most tokens/s. If no such worker is alive, it chooses a class
    with workers that are starting, or that had workers in the last minutes; otherwise `cpu`. The absence of workers is
    logged. What workers offer may be one second old, or with many workers five. Raises SettingsError if the class or
    the precision does not exist, or the class does not offer the precision.
    """
    if precision is not None and precision not in PRECISIONS:
        raise SettingsError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
    if hardware == "auto":
        wanted, offers = precision or "fp32", workers.offers()
        rates = {
            name: offer.tokens_per_s
            for (name, served, offered), offer in offers.items()
            if served == model and offered == wanted and name in settings.classes
        }
        hardware = max(rates, key=lambda name: (rates[name], name), default="")
        hardware = hardware or _without_workers(settings, workers, model, wanted, near_models(offers, model))
    offered = settings.hardware_class(hardware).precision
    if precision is not None and precision != offered:
        raise SettingsError(f"hardware class {hardware!r} offers precision {offered}, not {precision}")
    return hardware, offered


def workers_of(settings: Settings, workers: WorkerRegistry, job: JobSpec) -> Workers:
    """The live workers that take a job. What they say may be one second old, with many workers five."""
    offer = workers.offers().get((job.hardware, job.model, job.precision))
    if offer is None:
        return Workers()
    rates = offer.sustained
    return Workers(
        count=offer.workers,
        tokens_per_s=sum(rates) / len(rates) if rates else 0.0,
        max_tokens=offer.max_tokens,
        # A gateway may have a class that this process does not know.
        prefetch=settings.classes.get(job.hardware, HardwareClass()).prefetch,
    )


def with_chunk_size(settings: Settings, workers: WorkerRegistry, job: JobSpec, ahead: ReadAhead) -> JobSpec:
    """The specification with chunks for the workers that are alive; see :mod:`embedctl.queueing.chunk_sizes`.
    SettingsError: their model does not give what the job asks for, such as dense vectors, if it names none."""
    if ahead.is_one:
        return job  # the call asks Redis nothing more
    offer = workers.offers().get((job.hardware, job.model, job.precision))
    if offer is not None and (why := not_given(asked_by(job.options), offer.outputs, job.model)):
        raise SettingsError(why)
    size = chunk_bytes(ahead, workers_of(settings, workers, job), job.options)
    return dataclasses.replace(job, options={**job.options, "chunk_bytes": size})


def _without_workers(
    settings: Settings, workers: WorkerRegistry, model: str, precision: str, near: Sequence[str]
) -> str:
    """The class of a job that no live worker can take. The choice is logged, because the job stays with it."""
    offering = {keys.queue(name, model): name for name, each in settings.classes.items() if each.precision == precision}
    found = {name for name in offering.values() if workers.starting(name, model)}
    why = "whose workers are starting"
    if not found:
        found = {offering[queue] for queue in workers.served_lately(offering)}
        why = "whose workers left a moment ago" if found else "because no other class is known to have workers"
    chosen = FALLBACK_CLASS if FALLBACK_CLASS in found else min(found, default=FALLBACK_CLASS)
    sentence = (
        f"no live worker serves {model} in {precision}: the job goes to class {chosen}, {why}, and stays there. "
        f"{_capitalised(how_to_serve(chosen, model, near))}"
    )
    reminder(sentence)(sentence)
    return chosen


@lru_cache(64)
def reminder(sentence: str) -> Reminder:
    """The reminder that logs a sentence for the whole process, so that a loop that submits jobs logs it only once."""
    return Reminder(log.warning)


def local_class(settings: Settings, hardware: str | None) -> str:
    """The hardware class of a worker that this command starts: the argument, else the setting; `auto` means `cpu`.
    Raises SettingsError if there is no such class."""
    chosen = hardware or settings.hardware
    chosen = FALLBACK_CLASS if chosen == "auto" else chosen
    settings.hardware_class(chosen)
    return chosen


def near_models(offers: Mapping[Offered, Offer], model: str) -> tuple[str, ...]:
    """The models with a similar name that live workers offer, on any class, the nearest first."""
    return near_names(model, {served for (_, served, _), offer in offers.items() if not offer.spelling_of})


def same_model(settings: Settings, workers: WorkerRegistry, one: str, other: str) -> bool:
    """Whether two names are known to mean one model: they are two spellings of one repository, these settings describe
    neither of them, and no live worker serves only one of them, or each with other files."""
    if one == other:
        return True
    if other_spelling(one) != other or not settings.models.keys().isdisjoint((one, other)):
        return False
    served = ((row.models.get(one), row.models.get(other)) for row in workers.alive())
    return all(a is b or (a and b and a.fingerprint == b.fingerprint) for a, b in served)


def model_files(settings: Settings, workers: WorkerRegistry, job: JobSpec) -> frozenset[str]:
    """The fingerprints of the model's files, as the settings tell them, or the live workers that would take a job.
    Usually one; none if no such worker is alive."""
    entry = settings.models.get(job.model)
    if entry is not None and entry.fingerprint:
        return frozenset([entry.fingerprint])
    rows = (row for row in workers.alive(keys.queue(job.hardware, job.model)) if row.precision == job.precision)
    served = (row.models.get(job.model) for row in rows)
    if found := frozenset(each.fingerprint for each in served if each is not None):
        return found
    # A gateway tells what its workers offer, and not who they are.
    offer = workers.offers().get((job.hardware, job.model, job.precision))
    return frozenset() if offer is None else offer.fingerprints


def with_workers(workers: WorkerRegistry, job: JobStatus, *, recent: bool = False) -> JobStatus:
    """A job's status, with the workers that could take it now, or with `recent` a second ago."""
    live = workers.serving(job.hardware, job.model, recent=recent)
    near: tuple[str, ...] = ()
    mismatch: str | None = None
    hindrance = ""
    if not live and not job.state.ended:
        near = near_models(workers.offers(), job.model)
        hindrance = _hindrance(workers, job)
    if live and not job.state.ended and job.model_fingerprint is not None and workers.is_quiet(job):
        offer = workers.offers().get((job.hardware, job.model, job.precision))
        present = offer.fingerprints if offer is not None else frozenset()
        if job.model_fingerprint not in present:
            live, mismatch = 0, ", ".join(sorted(present)) or f"none in {job.precision}"
    return dataclasses.replace(job, live_workers=live, near_models=near, mismatch=mismatch, hindrance=hindrance)


def _hindrance(workers: WorkerRegistry, job: JobStatus) -> str:
    """What keeps the workers of a job from being seen; empty if nothing is known."""
    if full := workers.full_bytes():
        return redis_full(full)
    starting = workers.starting(job.hardware, job.model)
    said = starting[:_STARTING_SHOWN]
    more = [f"and {len(starting) - len(said)} more"] * (len(starting) > len(said))
    return f"No worker that serves {job.model} on {job.hardware} is ready. {'; '.join(said + more)}" if said else ""


def redis_full(full_bytes: tuple[int, int]) -> str:
    used, most = full_bytes
    return (
        f"Redis is full, {used:,} of {most:,} bytes, and takes nothing more, not even heartbeats, so live workers are "
        f"not seen: {MAKE_ROOM}"
    )


def no_worker_for(job: JobStatus) -> str:
    """The message about a job, as :func:`with_workers` gives it, that no live worker takes."""
    if job.mismatch is not None:
        first = job.pinned_by or "its first worker"  # a gateway does not tell who that was
        return (
            f"No live worker has the files of job {job.id}: no worker with fingerprint {job.model_fingerprint}; "
            f"present: {job.mismatch}. Start one with the files that {first} had, or discard the job and submit its "
            f"corpus again: embedctl discard {job.id}"
        )
    if job.hindrance:
        return job.hindrance
    how = _capitalised(how_to_serve(job.hardware, job.model, job.near_models))
    return f"No live worker serves {job.model} on {job.hardware}. {how}"


def missing_worker(job: JobStatus) -> str:
    """The message about a job with waiting records and no live worker; empty for any other job."""
    waits = not job.state.ended and job.done + job.failed < job.records
    return no_worker_for(job) if waits and not job.live_workers else ""


def how_to_serve(hardware: str, model: str, near: Sequence[str] = ()) -> str:
    """What to do about a model that no live worker serves: use a near one, if there is one, or start a worker."""
    start = f"start one: {start_command(hardware, model)}"
    if not near:
        return start
    serve = "Live workers serve it" if len(near) == 1 else "Live workers serve these"
    return f"{did_you_mean(near)} {serve}. If {model} is the right name, {start}"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def start_command(hardware: str, model: str) -> str:
    return f"embedctl worker --class {shlex.quote(hardware)} --model {shlex.quote(model)}"

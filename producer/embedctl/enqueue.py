"""Submitting: checks the options, makes or resumes the job, and adds its records."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from embedctl.broker import Broker
from embedctl.chunking import chunks_of
from embedctl.cut import ReadAhead
from embedctl.digests import with_digests
from embedctl.job import Job
from embedctl.kept import TEXT_SHA256, TOKENS, check_keep
from embedctl.notices import Reminder
from embedctl.option_checks import (
    check_dimensions,
    check_length,
    check_prompt_known,
    check_prompt_name,
    check_result_size,
    is_whole,
)
from embedctl.patience import came_of_an_absence, check_timeout, patiently
from embedctl.records import Record, RecordLike, records_of
from embedctl.routing import cut_by_work, resolve, same_model
from embedctl.store import JobSpec, JobStatus, WholeJob
from embedctl.submission import Submission, SubmitProgress
from embedctl.whole import begun_whole
from embedctl_config import tenants
from embedctl_config.errors import (
    BrokerUnavailable,
    CorpusChanged,
    EmbedctlError,
    JobError,
    QuotaExceeded,
    SettingsError,
)
from embedctl_config.loading import load_settings
from embedctl_config.redis_url import tenant_of
from embedctl_config.settings import MAX_CHUNK_RECORDS, MAX_TTL_S, Settings, check_model_name

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The longest prompt (bytes). It is put before each text, and all models take far less.
MAX_PROMPT_BYTES = 16 * 1024
#: The longest idempotency key (bytes). `embedctl run` makes its key from paths.
MAX_KEY_BYTES = 64 * 1024
#: The vectors of a chunk of at most this size are always smaller than that (records).
_SMALL_CHUNK = 1024

#: Options that do not have to be the same when a job is resumed.
_NOT_COMPARED = ("idempotency_key", "resume", "drain", "tenant", "lane")

Truncation = Literal["truncate", "error", "mean"]
TruncationSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of a submission; None means the value of the settings.

    `resume` is the id of a job whose producer did not finish. The submission goes on with the same records, and any
    other option given here must be the same as when the job was begun. `keep` names the fields that the records hold as
    kept fields, and so must always be the same. `batch_file` marks a job made of an OpenAI batch file. `drain` asks for
    a job that pauses while Redis holds too many of its results; somebody must drain it. `digests` has each record carry
    the SHA-256 of its text.
    """

    model: str | None = None
    hardware: str | None = None
    precision: str | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    truncation: Truncation = "truncate"
    truncation_side: TruncationSide | None = None
    normalize: bool = True
    dimensions: int | None = None
    chunk_size: int | None = None
    ttl: float | None = None
    idempotency_key: str | None = None
    max_errors: int | None = None
    max_errors_share: float | None = None
    resume: str | None = None
    keep: Sequence[str] = ()
    count_tokens: bool = False
    batch_file: bool = False
    drain: bool = False
    tenant: str | None = None
    lane: str | None = None
    digests: bool = False


#: Options that a job holds only if they are set.
_LATER_OPTIONS = ("keep", "count_tokens", "batch_file", "digests")
#: The same, of those that decide vectors.
_LATER_DECIDING = ("prompt_name", "truncation_side")


def enqueue_embeddings(
    texts: Iterable[RecordLike],
    *,
    model: str | None = None,
    hardware: str | None = None,
    precision: str | None = None,
    ids: Iterable[str | int | None] | None = None,
    text_field: str = "text",
    id_field: str = "id",
    prompt: str | None = None,
    prompt_name: str | None = None,
    truncation: Truncation = "truncate",
    truncation_side: TruncationSide | None = None,
    normalize: bool = True,
    dimensions: int | None = None,
    chunk_size: int | None = None,
    ttl: float | None = None,
    idempotency_key: str | None = None,
    max_errors: int | str | None = None,
    keep: Sequence[str] = (),
    count_tokens: bool = False,
    unique_ids: bool = False,
    tenant: str | None = None,
    lane: str = tenants.NORMAL,
    digests: bool = False,
    timeout: float | None = None,
    progress: SubmitProgress | None = None,
    settings: Settings | None = None,
) -> Job:
    """Queue texts for embedding.

    Returns once every text is stored in Redis; workers begin with the first chunk. Blocks while more than
    `high_water_bytes` of the job's text waits for workers, while the tenant's limits leave no room, while Redis is
    full, while another process submits the same job, and while Redis is unreachable, for up to two minutes. The reason
    is logged at once and then every minute.

    Args:
        texts: strings, or mappings with a text and an optional id; any iterable, such as a table's column, read lazily.
            An empty or missing text (None, NaN) becomes a record error, as does a number among texts, and every other
            record gets its vector. An item of any other kind is refused.
        model: the model's name at the workers; the model of the settings if None.
        hardware: a hardware class, or "auto" for the fastest that is alive and offers the precision.
        precision: "fp32", "fp16" or "int8". If None, the class's precision, or fp32 with "auto".
        ids: labels that come back with the vectors, one for each text. They may repeat; None means no label.
        text_field: the field of the text, if `texts` holds mappings.
        id_field: the field of the id, if `texts` holds mappings; a mapping without it has no id.
        prompt: put before every text; the model's default prompt if None, no prompt if empty.
        prompt_name: the name of one of the model's own prompts, such as "query", instead of `prompt`.
        truncation_side: the end that a text that is too long loses, "left" or "right"; that of the model's tokenizer if
            None.
        truncation: "truncate" encodes the first tokens of a text that is too long and reports it; "error" fails it;
            "mean" encodes all of it, window by window, and gives the mean of the windows' vectors.
        normalize: make every vector of unit length.
        dimensions: keep only this many leading components of each vector, for models made for that (Matryoshka); all if
            None.
        chunk_size: most records in a chunk. A chunk has fewer if they are about two seconds' work, or if each live
            worker can so have a part of the job.
        ttl: seconds to keep the job after its end. Before, it is kept for at least 7 days after its last progress.
        idempotency_key: a second call with this key and the same texts returns the same job; if the first call died
            half-way, the second continues where it stopped. The key is kept as long as the job.
        max_errors: the error budget: a number of records, or a share such as "1%". More failed records end the job.
        keep: fields of the mappings that come back with the vectors, such as `("title", "url")`. A field that a mapping
            does not have is null. At most 32 fields, and 64 KiB for each record.
        count_tokens: give each record's number of tokens with its vector (:attr:`ChunkVectors.tokens`).
        unique_ids: refuse an id that occurs twice. That is known once `texts` has been read, so the call raises when
            all but the end is queued, and the job is cancelled unless it has an idempotency key. Of a
            small list, nothing is queued.
        tenant: whom the job belongs to; the tenant of the settings if None. Tenants that wait for the same workers take
            turns, by the weights in the settings.
        lane: "interactive" if somebody waits for the vectors, "background" if the job has time: it is done while
            nothing else waits.
        digests: give the SHA-256 of each text with its vector (:attr:`ChunkVectors.digests`), and write it into .npy
            and .parquet files, so that `--since` can tell what has changed.
        timeout: most seconds that this call may take; None for no limit. The call checks it between chunks and while it
            waits, but not while `texts` is slow to give its next item. If Redis hangs without an answer, the call ends
            at most one socket timeout (10 s) later.
        progress: called in this thread after each chunk and while the call waits. Its arguments are the number of
            records queued so far, and what the call waits for, in words or "". An exception that it raises ends the
            call.
        settings: read from the environment and the configuration files if None.

    Raises:
        SettingsError: an argument or a setting is wrong.
        InputError: `texts` or `ids` is a table or anything else that does not give one item after the other, or an item
            can't be a record.
        CorpusChanged: the idempotency key belongs to a job with other texts or options.
        BrokerUnavailable: Redis can't be reached.
        JobFailed: `max_errors` ended the job before it had all its records.
        JobCancelled: somebody cancelled it meanwhile.
        WaitTimeout: the time is over. With an idempotency key, the same call continues the job; without one, the job is
            cancelled, if Redis can be reached.
        JobLost: Redis came back without its last writes. With an idempotency key, the same call continues the job.
        QuotaExceeded: the tenant has as many jobs, or as much waiting, as its limits allow. Nothing is queued. A job
            that has begun waits for room instead.
    """
    settings = load_settings() if settings is None else settings
    most, share = parse_budget(max_errors)
    options = JobOptions(
        model=model,
        hardware=hardware,
        precision=precision,
        prompt=prompt,
        prompt_name=prompt_name,
        truncation=truncation,
        truncation_side=truncation_side,
        normalize=normalize,
        dimensions=dimensions,
        chunk_size=chunk_size,
        ttl=ttl,
        idempotency_key=idempotency_key,
        max_errors=most,
        max_errors_share=share,
        keep=check_keep(keep),
        count_tokens=count_tokens,
        tenant=tenant,
        lane=lane,
        digests=digests,
    )
    broker = Broker.shared(settings)
    records = records_of(
        texts,
        ids=ids,
        text_field=text_field,
        id_field=id_field,
        keep=options.keep,
        max_bytes=settings.max_text_bytes,
    )
    if unique_ids:
        from embedctl.unique import checked  # here, because few calls need it

        records = checked(records)
    return submit(broker, records, options, progress, timeout, at_hand=isinstance(texts, Sized))


def submit(
    broker: Broker,
    records: Iterable[Record],
    options: JobOptions,
    progress: SubmitProgress | None = None,
    timeout: float | None = None,
    taking_up: Callable[[JobStatus], object] | None = None,
    *,
    at_hand: bool = False,
) -> Job:
    """Queue records; see :func:`enqueue_embeddings`. `taking_up` is called with the job, which may hold some already.

    With `at_hand`, nobody has to write the records first. Then some are read before the job is made, to see how large
    it is.

    Ctrl-C, the timeout, or an exception from `records` or `progress` interrupts the submission. Without an idempotency
    key or `resume`, nobody could continue the job, so it is cancelled.
    """
    check_timeout(timeout)
    began = time.monotonic()
    broker.connection.check_server()
    # Imports take a while. Where one fails, or is interrupted, there is no job yet.
    broker.tickets.prepare()
    ahead = ReadAhead(with_digests(records) if options.digests else records, at_hand=at_hand)
    when_there_is_room = partial(
        _when_there_is_room, progress=progress, deadline=None if timeout is None else began + timeout
    )
    whole, token = None, None
    if taking_up is None and options.idempotency_key is None and options.resume is None:
        token = secrets.token_hex(8)
        begin = partial(begun_whole, broker, partial(job_spec, broker, options), ahead, token)
        whole = when_there_is_room(begin)
        if whole is not None and whole.sealed_at is not None:
            return _finished(broker, whole, progress, None if timeout is None else began + timeout)
    if whole is not None:
        broker.send(whole.queue, whole.issued)
    if whole is not None and whole.job_id is not None:
        job = broker.jobs.status(whole.job_id)  # a step failed: each is taken by itself, and some of them again
    else:
        job = when_there_is_room(lambda: _begun(broker, options, ahead))
    if taking_up is not None:
        taking_up(job)
    chunks = chunks_of(ahead, max_rows=job.options["chunk_size"], max_bytes=job.options["chunk_bytes"])
    resumable = options.idempotency_key is not None or options.resume is not None
    try:
        with Submission(broker, job, progress, timeout, began=began, token=token) as submission:
            submission.reopen()
            try:
                for chunk in chunks:
                    submission.add(chunk)
            except QuotaExceeded:  # the job is empty: it must not count, nor keep its idempotency key
                if options.resume is None:
                    _cancel(broker, job.id)
                raise
            submission.seal()
    except (BrokerUnavailable, JobError, QuotaExceeded):
        raise  # the message says how to go on, or the job has ended
    except BaseException as error:  # Ctrl-C and SystemExit too
        if not resumable and not came_of_an_absence(error):
            _cancel(broker, job.id)
        raise
    return Job(job.id, broker, sealed_with=submission.chunks)


def parse_budget(max_errors: int | str | None) -> tuple[int | None, float | None]:
    """An error budget as a number of records and as a share of them; None for the one that is not given.

    Raises:
        SettingsError: it is neither.
    """
    if max_errors is None:
        return None, None
    text = str(max_errors)
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 <= share <= 1:
                return None, share
        elif int(text) >= 0:
            return int(text), None
    except ValueError:
        pass
    raise SettingsError(f"max_errors {max_errors!r} is neither a number of records such as 100 nor a share such as 1%")


def _finished(broker: Broker, whole: WholeJob, progress: SubmitProgress | None, deadline: float | None) -> Job:
    """Send the tickets of a job that was made as a whole."""
    job_id = str(whole.job_id)
    try:
        patiently(partial(broker.send, whole.queue, whole.issued), deadline=deadline)
        if progress is not None:
            progress(whole.records, "")
    except BrokerUnavailable as error:
        raise type(error)(f"{error} Job {job_id} has all its records, and goes on when Redis is back") from error
    except BaseException as error:
        if not came_of_an_absence(error):
            _cancel(broker, job_id)
        raise
    return Job(job_id, broker, sealed_with=1, seen=whole.sealed_at)


def _when_there_is_room(begin: Callable[[], T], progress: SubmitProgress | None, deadline: float | None) -> T:
    """Make a job, again while Redis is full. That is safe, because a full Redis has written nothing."""
    remind = Reminder(log.warning)

    def pausing(_: BrokerUnavailable) -> None:
        remind("the submission waits for Redis, which is full")
        if progress is not None:
            progress(0, "Redis")

    # No retry if Redis goes away: it may have made a job without telling us.
    return patiently(begin, pausing=pausing, deadline=deadline, outage_s=0.0)


def _begun(broker: Broker, options: JobOptions, ahead: ReadAhead) -> JobStatus:
    """The job to add to: a new one, the one of this idempotency key, or the one to resume."""
    if options.resume is not None:
        if options.idempotency_key is not None:
            raise SettingsError("resume and idempotency_key could name two different jobs: leave one of them out")
        job = broker.jobs.status(broker.jobs.resolve(options.resume))
        _check_same(broker, job, {**_given(options), **_later(options)})
        return job
    spec = cut_by_work(broker.settings, broker.workers, job_spec(broker, options), ahead)
    job_id, created = broker.jobs.create(spec)
    job = broker.jobs.status(job_id)
    if not created:
        # Hardware may differ: with `auto` it depends on who is alive. So does `chunk_bytes`: the stored one applies.
        deciding = {name: getattr(options, name) for name in _LATER_DECIDING}
        now = {"model": spec.model, "precision": spec.precision, **spec.options, **deciding, **_later(options)}
        del now["chunk_bytes"]
        _check_same(broker, job, now)
    return job


def _later(options: JobOptions) -> dict[str, Any]:
    """The later options as a job holds them: in JSON, or None."""
    return {"keep": list(options.keep) or None, **{name: getattr(options, name) or None for name in _LATER_OPTIONS[1:]}}


def _given(options: JobOptions) -> dict[str, Any]:
    """The options given for a job to resume: all that differ from their defaults."""
    plain = JobOptions()
    names = (each.name for each in dataclasses.fields(JobOptions) if each.name not in _NOT_COMPARED)
    given = {name: value for name in names if (value := getattr(options, name)) != getattr(plain, name)}
    return {name: value for name, value in given.items() if (name, value) != ("hardware", "auto")}


def tenant_for(settings: Settings, tenant: str | None) -> str:
    """The tenant that a job is to belong to.

    Args:
        settings: they name a tenant, and the user of Redis.
        tenant: the one that the caller asks for; None for that of the settings.

    Raises:
        SettingsError: the user of Redis sees the jobs of another tenant alone.
    """
    chosen = settings.tenant if tenant is None else tenant
    only = tenant_of(settings)
    if only is None or (tenant is None and chosen == tenants.DEFAULT):
        return only or chosen
    if chosen != only:
        raise SettingsError(
            f"tenant {chosen!r}: this process is user {tenants.USER}{only} of Redis, and makes jobs of tenant {only!r} "
            "alone: leave the tenant out"
        )
    return chosen


def job_spec(broker: Broker, options: JobOptions) -> JobSpec:
    """The specification of a job: the options completed from the settings, the hardware class resolved, all checked.

    Raises:
        SettingsError: an option is wrong.
    """
    settings = broker.settings
    model = settings.model if options.model is None else options.model
    if wrong := check_model_name(model):
        raise SettingsError(wrong)
    tenant = tenant_for(settings, options.tenant)
    lane = tenants.NORMAL if options.lane is None else options.lane
    if wrong := tenants.check_tenant(tenant) or tenants.check_lane(lane):
        raise SettingsError(wrong)
    if options.truncation not in get_args(Truncation):
        raise SettingsError(f"truncation {options.truncation!r} is none of {', '.join(get_args(Truncation))}")
    chunk_size = settings.chunk_size if options.chunk_size is None else options.chunk_size
    ttl = settings.ttl_s if options.ttl is None else options.ttl
    if not is_whole(chunk_size) or not 1 <= chunk_size <= MAX_CHUNK_RECORDS:
        raise SettingsError(f"chunk_size {chunk_size!r} is not a whole number between 1 and {MAX_CHUNK_RECORDS}")
    if options.count_tokens and TOKENS in options.keep:
        raise SettingsError(
            f"keep: {TOKENS!r} is what output files call the number of tokens (count_tokens): rename the field, or "
            "leave one of them out"
        )
    if options.digests and TEXT_SHA256 in options.keep:
        raise SettingsError(
            f"keep: {TEXT_SHA256!r} is what output files call the digest of a text (digests): rename the field, or "
            "leave one of them out"
        )
    check_length("prompt", options.prompt, MAX_PROMPT_BYTES)
    check_prompt_name(options.prompt_name, options.prompt)
    if options.truncation_side is not None and options.truncation_side not in get_args(TruncationSide):
        raise SettingsError(f"truncation_side {options.truncation_side!r} is neither left nor right")
    check_length("idempotency_key", options.idempotency_key, MAX_KEY_BYTES)
    if options.idempotency_key == "":
        raise SettingsError(
            "idempotency_key is empty, and so would be the same for every job: give this job a key, or leave it out"
        )
    if not (is_whole(ttl) or isinstance(ttl, float)) or not 1 <= ttl <= MAX_TTL_S:
        raise SettingsError(f"ttl {ttl!r} is not between 1 and {MAX_TTL_S:.0f} seconds")
    hardware, precision = resolve(
        settings,
        broker.workers,
        model=model,
        hardware=options.hardware or settings.hardware,
        precision=options.precision,
    )
    if options.prompt_name is not None:
        check_prompt_known(broker, options.prompt_name, model, hardware)
    if options.dimensions is not None:
        check_dimensions(broker, options.dimensions, model, hardware)
    if chunk_size > _SMALL_CHUNK:
        check_result_size(broker, chunk_size, options.dimensions, model, hardware)
    deciding: dict[str, Any] = {
        "prompt": options.prompt,
        "truncation": options.truncation,
        "normalize": options.normalize,
        "dimensions": options.dimensions,
        "chunk_size": chunk_size,
        "chunk_bytes": settings.chunk_bytes,
    }
    later = {**_later(options), **{name: getattr(options, name) for name in _LATER_DECIDING}}
    deciding |= {name: value for name, value in later.items() if value is not None}
    return JobSpec(
        model,
        hardware,
        precision,
        deciding,
        ttl,
        options.idempotency_key,
        options.max_errors,
        options.max_errors_share,
        broker.results_high_water() if options.drain else None,
        broker.data.made_store(),
        tenant,
        lane,
        settings.tenants.get(tenant, tenants.TenantEntry()).weight,
    )


def _check_same(broker: Broker, job: JobStatus, now: Mapping[str, Any]) -> None:
    before = {**dataclasses.asdict(job), "ttl": job.ttl_s, **job.options}
    if "model" in now and same_model(broker.settings, broker.workers, job.model, now["model"]):
        before["model"] = now["model"]
    changed = [f"{name} was {before.get(name)!r} and is {now[name]!r}" for name in now if before.get(name) != now[name]]
    if changed:
        raise CorpusChanged(
            f"job {job.id} was begun with other options: {'; '.join(changed)}. Use the same ones, or submit a new job."
        )


def _cancel(broker: Broker, job_id: str) -> None:
    try:
        broker.jobs.cancel(job_id)
    except EmbedctlError as error:  # what interrupted the submission is the error to show
        log.warning("job %s is half submitted and could not be cancelled: %s", job_id, error)

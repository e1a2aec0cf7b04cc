"""Submitting: checks the options, makes or resumes the job, and adds its records."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from embedctl.common.notices import Reminder
from embedctl.corpus.digests import with_digests
from embedctl.corpus.pieces import check_splitting, pieces_of
from embedctl.corpus.records import Record, RecordLike
from embedctl.corpus.rows import Rows, records_of
from embedctl.corpus.template import parse_template
from embedctl.jobs.job import Job
from embedctl.jobs.offered import check_against_workers, keeps, most_chunk_bytes
from embedctl.jobs.options import JobOptions, SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.queueing.chunk_sizes import ReadAhead, chunks_of
from embedctl.queueing.retrying import TimeLimit, is_redis_away, retry_redis
from embedctl.queueing.routing import resolve, same_model, with_chunk_size
from embedctl.store import InlineJob, JobSpec, JobStatus
from embedctl.waiting.submission import Submission, SubmitProgress
from embedctl_config import tenants, wire
from embedctl_config.errors import (
    BrokerUnavailable,
    CorpusChanged,
    EmbedctlError,
    JobError,
    QuotaExceeded,
)
from embedctl_config.fingerprint import DECIDING_OPTIONS, LATER_OPTIONS
from embedctl_config.loading import load_settings
from embedctl_config.record_ids import RecordId
from embedctl_config.settings import Settings

if TYPE_CHECKING:
    from embedctl.remote.jobs import RemoteJobs

log = logging.getLogger(__name__)

T = TypeVar("T")

#: An inline job has at most so many records and bytes. A larger one is not held up by a few round trips.
_INLINE_RECORDS, _INLINE_BYTES = 256, 32 * 1024
#: Options that do not have to be the same when a job is resumed.
_NOT_COMPARED = ("idempotency_key", "resume", "drain", "duplicates", "tenant", "lane", "column_types", "kept")
#: Options that decide what is stored for each record, and so are compared even where they are not given.
_OF_RECORDS = ("keep", "count_tokens", "batch_file", "digests")
#: Options that a gateway is not told: they are the submission's own.
_NOT_ASKED = ("resume", "duplicates", "kept")
#: Options that every job holds.
_ALWAYS_HELD = (*DECIDING_OPTIONS, "dimensions", "chunk_size")
#: Those that a job holds only if they are set.
_IF_SET = (*LATER_OPTIONS, *_OF_RECORDS, "column_types", "dims_anyway")


def enqueue_embeddings(
    texts: Iterable[RecordLike],
    *,
    ids: Iterable[RecordId | None] | None = None,
    text_field: str = "text",
    id_field: str = "id",
    template: str | None = None,
    timeout: float | None = None,
    progress: SubmitProgress | None = None,
    settings: Settings | None = None,
    **options: Unpack[JobOptions],
) -> Job:
    """Queue texts for embedding.

    Returns once every text is stored in Redis; workers begin with the first chunk. Blocks while
    more of the job's text waits for workers than a sixteenth of Redis' maxmemory, while the tenant's limits leave no
    room, while Redis is full, while another process submits the same job, and while Redis is unreachable, for up to
    two minutes. The reason is logged at once and then every minute.

    Args:
        texts: strings, or mappings with a text and an optional id; any iterable, such as a table's column, read lazily.
            An empty or missing text (None, NaN) becomes a record error, as does a number among texts, and every other
            record gets its vector. An item of any other kind is refused.
        ids: labels that come back with the vectors, one for each text. All are of one type: text, whole numbers of 64
            bits, UUIDs, decimals, bytes or dates. They may repeat; None means no label.
        text_field: the field of the text, if `texts` holds mappings.
        id_field: the field of the id, if `texts` holds mappings; a mapping without it has no id.
        template: makes each text of several fields of its mapping, such as "title: {title} | text: {text}".
        timeout: most seconds that this call may take; None for no limit. The call checks it between chunks and while it
            waits, but not while `texts` is slow to give its next item. If Redis hangs without an answer, the call ends
            at most one socket timeout (10 s) later.
        progress: called in this thread after each chunk and while the call waits. Its arguments are the number of
            records queued so far, and what the call waits for, in words or "". An exception that it raises ends the
            call.
        settings: read from the environment and the configuration files if None.
        options: those of :class:`JobOptions`, such as `model`, `precision` and `idempotency_key`.

    Raises:
        TypeError: there is no such option.
        SettingsError: an argument or a setting is wrong.
        InputError: `texts` or `ids` is a table or anything else that does not give one item after the other, or an item
            can't be a record.
        CorpusChanged: the idempotency key belongs to a job with other texts or options.
        BrokerUnavailable: Redis can't be reached.
        JobFailed: `max_errors` ended the job before it had all its records.
        JobCancelled: somebody cancelled it meanwhile.
        WaitTimeout: the time is over. With an idempotency key, the same call resumes the job; without one, the job is
            cancelled, if Redis can be reached.
        JobLost: Redis came back without its last writes. With an idempotency key, the same call resumes the job.
        QuotaExceeded: the tenant has as many jobs, or as much waiting, as its limits allow. Nothing is queued. A job
            that has begun waits for room instead.
    """
    chosen = SubmitOptions.of(**options)
    broker = Broker.shared(load_settings() if settings is None else settings)
    rows = Rows(broker.settings.max_text_bytes, text_field, id_field, chosen.corpus_keep, parse_template(template))
    records = as_asked(records_of(texts, rows, ids), rows, chosen, broker.settings)
    return submit(broker, records, chosen, progress, timeout, at_hand=isinstance(texts, Sized))


def as_asked(records: Iterator[Record], rows: Rows, options: SubmitOptions, settings: Settings) -> Iterator[Record]:
    """The records of a job that is made of these: themselves, or their pieces. SettingsError: they can't be split."""
    if not options.splits:
        return records
    check_splitting(rows)
    model = options.model or settings.model
    return pieces_of(records, model, options.prompt, options.prompt_name)


def submit(
    broker: Broker,
    records: Iterable[Record],
    options: SubmitOptions,
    progress: SubmitProgress | None = None,
    timeout: float | None = None,
    on_job: Callable[[JobStatus], object] | None = None,
    *,
    at_hand: bool = False,
) -> Job:
    """Queue records; see :func:`enqueue_embeddings`. `on_job` is called with the job, which may hold some already.

    With `at_hand`, nobody has to write the records first. Then some are read before the job is made, to see how large
    it is.

    Ctrl-C, the timeout, or an exception from `records` or `progress` interrupts the submission. Without an idempotency
    key or `resume`, nobody could resume the job, so it is cancelled.
    """
    limit = TimeLimit.from_now(timeout)
    broker.connection.check_server()
    options = _as_begun(broker, options)
    ahead = ReadAhead(_checked(records, options), at_hand=at_hand)
    when_there_is_room = partial(_when_there_is_room, progress=progress, deadline=limit.deadline)
    resumable = options.idempotency_key is not None or options.resume is not None
    token, job = secrets.token_hex(8), None
    if on_job is None and not resumable:
        inline = when_there_is_room(partial(_begun_inline, broker, options, ahead, token))
        if inline is not None and inline.sealed_at is not None:
            return _finished(broker, inline, progress)
        if inline is not None and inline.job_id is not None:  # each step is taken by itself, and some of them again
            job = broker.jobs.status(inline.job_id)
    if job is None:
        job = when_there_is_room(partial(_begun, broker, options, ahead))
    if on_job is not None:
        on_job(job)
    try:
        chunks = _add_all(Submission(broker, job, progress, limit, token), job, ahead, options)
    except (BrokerUnavailable, JobError, QuotaExceeded):
        raise  # the message says how to resume, or the job has ended
    except BaseException as error:  # Ctrl-C and SystemExit too
        if not resumable and not is_redis_away(error):
            _cancel(broker, job.id)
        raise
    return Job(job.id, broker, sealed_with=chunks)


def begun_before(broker: Broker, options: SubmitOptions) -> str | None:
    """The id of the job that a submission with these options goes on with; None if it makes a new one."""
    if options.resume is not None:
        return broker.jobs.resolve(options.resume)
    spec = job_spec(broker, options)
    return None if spec.idempotency_key is None else broker.jobs.with_key(spec.idempotency_key, spec.tenant)


def _as_begun(broker: Broker, options: SubmitOptions) -> SubmitOptions:
    """The options, with digests if a job to resume has them: it may be resumed by any producer, and those on the
    command line ask for digests, while others may not."""
    if options.resume is None:
        return options
    begun = broker.jobs.status(broker.jobs.resolve(options.resume))
    return dataclasses.replace(options, digests=bool(begun.options.get("digests")))


def _checked(records: Iterable[Record], options: SubmitOptions) -> Iterable[Record]:
    if options.duplicates == "error":
        from embedctl.corpus.unique import checked  # here, because few calls need it

        records = checked(records)
    return with_digests(records) if options.digests else records


def _begun_inline(broker: Broker, options: SubmitOptions, ahead: ReadAhead, token: str) -> InlineJob | None:
    """Make a job, without an idempotency key, of the records of `ahead`, which stay there; None if they are not one
    small chunk. Raises BrokerUnavailable if Redis can't be reached, and may have made the job; or if it is full, and
    has not."""
    records = ahead.whole_within(_INLINE_RECORDS, _INLINE_BYTES)
    if not records:
        return None
    spec = with_chunk_size(broker.settings, broker.workers, job_spec(broker, options), ahead)
    chunk, *others = chunks_of(records, max_rows=spec.options["chunk_size"], max_bytes=spec.options["chunk_bytes"])
    if others or spec.data is not None:
        return None
    payload = wire.encode_input(chunk)
    return broker.jobs.create_inline(spec, payload, digest=wire.digest_of(payload), rows=len(chunk), token=token)


def _finished(broker: Broker, inline: InlineJob, progress: SubmitProgress | None) -> Job:
    job_id = str(inline.job_id)
    try:
        if progress is not None:
            progress(inline.records, "")
    except BaseException:
        _cancel(broker, job_id)
        raise
    return Job(job_id, broker, sealed_with=1, seen=inline.sealed_at)


def _when_there_is_room(begin: Callable[[], T], progress: SubmitProgress | None, deadline: float | None) -> T:
    """Make a job, again while Redis is full. That is safe, because a full Redis has written nothing."""
    remind = Reminder(log.warning)

    def pausing(error: BrokerUnavailable) -> None:
        remind(f"the submission waits. {error}")
        if progress is not None:
            progress(0, "Redis")

    # No retry if Redis goes away: it may have made a job without telling us.
    return retry_redis(begin, pausing=pausing, deadline=deadline, retry_s=0.0)


def _begun(broker: Broker, options: SubmitOptions, ahead: ReadAhead) -> JobStatus:
    """The job to add to: a new one, the one of this idempotency key, or the one to resume."""
    if options.resume is not None:
        job = broker.jobs.status(broker.jobs.resolve(options.resume))
        _check_same(broker, job, {**dict.fromkeys(_OF_RECORDS), **_given(options)})
        return job
    spec = with_chunk_size(broker.settings, broker.workers, job_spec(broker, options), ahead)
    job_id, created = broker.jobs.create(spec)
    job = broker.jobs.status(job_id)
    if not created:
        # Hardware may differ: with `auto` it depends on who is alive. So does `chunk_bytes`: the stored one applies.
        now = {"model": spec.model, "precision": spec.precision, **dict.fromkeys(job.options), **spec.options}
        del now["chunk_bytes"]
        _check_same(broker, job, now)
    return job


def _add_all(submission: Submission, job: JobStatus, ahead: ReadAhead, options: SubmitOptions) -> int:
    """Add all records to a job, and seal it; returns its number of chunks."""
    chunks = chunks_of(ahead, max_rows=job.options["chunk_size"], max_bytes=job.options["chunk_bytes"])
    with submission:
        submission.reopen()
        try:
            for chunk in chunks:
                submission.add(chunk)
        except QuotaExceeded:  # an empty job must not count, nor keep its idempotency key; nobody resumes one without
            if options.resume is None and not (submission.chunks and options.idempotency_key):
                _cancel(submission.broker, job.id)
            raise
        submission.seal()
    return submission.chunks


def _values(options: SubmitOptions) -> dict[str, Any]:
    return {**dataclasses.asdict(options), "keep": list(options.keep)}


def _given(options: SubmitOptions) -> dict[str, Any]:
    """The options given for a job to resume: all that differ from their defaults."""
    plain = _values(SubmitOptions())
    given = {name: value for name, value in _values(options).items() if value != plain[name]}
    return {
        name: value
        for name, value in given.items()
        if name not in _NOT_COMPARED and (name, value) != ("hardware", "auto")
    }


def job_spec(broker: Broker, options: SubmitOptions) -> JobSpec:
    """The specification of a job: the options completed from the settings, the hardware class resolved, all checked;
    raises SettingsError if an option is wrong."""
    settings = broker.settings
    model = settings.model if options.model is None else options.model
    tenant = settings.tenant if options.tenant is None else options.tenant
    lane = tenants.NORMAL if options.lane is None else options.lane
    chunk_size = settings.chunk_size if options.chunk_size is None else options.chunk_size
    ttl = settings.ttl_s if options.ttl is None else options.ttl
    # What comes from the settings is checked like what was given.
    options = dataclasses.replace(options, model=model, tenant=tenant, lane=lane, chunk_size=chunk_size, ttl=ttl)
    values = _values(options)
    if broker.remote is not None:
        return _remote_spec(broker.remote, settings, options)
    hardware, precision = resolve(
        settings,
        broker.workers,
        model=model,
        hardware=options.hardware or settings.hardware,
        precision=options.precision,
    )
    check_against_workers(broker, options, model, hardware)
    return JobSpec(
        model,
        hardware,
        precision,
        held_options(values, most_chunk_bytes(broker, options, model, hardware)),
        ttl,
        options.idempotency_key,
        options.max_errors,
        options.max_errors_share,
        broker.results_high_water() if options.drain else None,
        broker.chunk_files.make_place(),
        tenant,
        lane,
        settings.tenants[tenant].weight if tenant in settings.tenants else None,
        keeps(broker, options, model, hardware, precision),
    )


def held_options(values: Mapping[str, Any], chunk_bytes: int) -> dict[str, Any]:
    """The options that a job holds, of the values of all options that may be given."""
    always = {name: values[name] for name in _ALWAYS_HELD}
    return {**always, "chunk_bytes": chunk_bytes, **{name: values[name] for name in _IF_SET if values[name]}}


def _remote_spec(jobs: RemoteJobs, settings: Settings, options: SubmitOptions) -> JobSpec:
    """The specification of a job that a gateway is to hold, whose workers, classes and key decide; the options are
    those of :func:`job_spec`, completed."""
    asked = {name: value for name, value in _values(options).items() if name not in _NOT_ASKED}
    asked |= {"hardware": options.hardware or settings.hardware, "chunk_bytes": settings.chunk_bytes}
    return jobs.spec({**asked, "tenant": None if options.tenant == tenants.DEFAULT else options.tenant})


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

"""`--sync` of a file, and `--cache`: what is known is copied, and a job encodes the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedctl.cli.corpora import records_again
from embedctl.cli.delivery import told_contract
from embedctl.cli.job_command import JobCommand
from embedctl.cli.results import NOT_TO_FREE
from embedctl.cli.sync import Report, Sync, Work
from embedctl.corpus.records import Record
from embedctl.destinations.interface import Contract
from embedctl.destinations.loop import Delivered, ignore
from embedctl.jobs.enqueue import job_spec
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import model_files, same_model
from embedctl.store import JobSpec, JobStatus
from embedctl.sync.comparison import Difference
from embedctl.sync.earlier import open_earlier
from embedctl.sync.known import Earlier
from embedctl.sync.merged import Merged, OtherVectors, Sources
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import JobError, JobNotFound, OutputError
from embedctl_config.fingerprint import deciding

if TYPE_CHECKING:
    from embedctl.sync.cache import Cache

Say = Callable[[str], None]
#: Names of options that say little by themselves.
_IN_WORDS = {"long": "way with long texts", "vectors": "kind of vectors"}


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
    about = told_contract(broker, spec)
    confirmed = about is not None
    earlier = earlier_of(command, path, say)
    if earlier is not None and (why_not := _differs(earlier.about, broker, spec)):
        say(f"{earlier.name} is not used, because {why_not}: all records are encoded")
        earlier = None
    about = about if earlier is None else earlier.about
    if cache is None:
        return Sources(earlier, None, about, confirmed)
    if about is None:
        say(f"The cache is not read, because no live worker tells which files model {spec.model} has")
        return Sources(earlier, None, about, confirmed)
    from embedctl.sync.cache import Cached

    return Sources(earlier, Cached(cache, about), about, confirmed)


def _differs(about: Contract, broker: Broker, spec: JobSpec) -> str:
    """Why the vectors of an output are others than those of a job, in words; empty if nothing says so."""
    models = model_files(broker.settings, broker.workers, spec)
    mine: Mapping[str, Any] = deciding(spec.options)
    options = sorted(name for name in mine.keys() | about.options.keys() if mine.get(name) != about.options.get(name))
    if options:
        return f"it was made with another {_IN_WORDS.get(options[0], options[0])}"
    if about.precision != spec.precision:
        return f"its vectors promise {about.precision}, not {spec.precision}"
    if models and about.model_fingerprint not in models:
        return "it was made with other weights, or another tokenizer or pooling"
    if not models and not same_model(broker.settings, broker.workers, about.model, spec.model):
        return f"it was made with model {about.model}, not {spec.model}"
    return ""


@dataclass
class Update(Work):
    """Writes the vectors of a corpus into a file, which is also the earlier output, and encodes only those that are not
    known."""

    path: Path
    _cache: Cache | None = None
    _job: Job | None = None

    def __post_init__(self) -> None:
        self._spec = job_spec(self.broker, self.command.choice.options)
        #: The first time, lines that are skipped are listed.
        self._reads = iter((self.command.choice.records,))

    def run(self) -> Report:
        """If what is known can't be used, nothing is queued. InputError: the corpus can't be read, or changes
        meanwhile."""
        with opened_cache(self.broker, self.command) as self._cache:
            try:
                try:
                    return self._done(sources_of(self.broker, self.command, self.path, self._cache, self.progress.say))
                except OtherVectors as error:
                    self.progress.say(f"{error}: nothing is copied, and all records are encoded")
                    return self._done(Sources())
            except NOT_TO_FREE:
                raise
            except JobError:
                self._discard()
                raise

    def _done(self, sources: Sources) -> Report:
        """Compare, encode what is lacking, write everything, and add what was encoded to the cache."""
        self._discard()
        difference = sources.compared(self._records(), self.progress.say)
        if difference.to_encode:
            self._job = self._made(difference)
        else:
            self.progress.say("No text is new or changed: nothing is encoded")
        merged = Merged(difference, sources, self._records, self._spec, self._job)
        done = self.command.destination.save(merged, self.broker, self.progress)
        self._say_what_is_trusted(sources, difference)
        if self._job is not None and self._cache is not None:
            self._fill(self._cache, self._job)
        report = self._report(sources, difference, merged.status(), done)
        self._discard()  # its vectors are in the file, and the next command has another difference
        return report

    def _discard(self) -> None:
        if self._job is not None:
            with suppress(JobNotFound):
                self._job.discard()
            self._job = None

    def _records(self) -> Iterator[Record]:
        return next(self._reads, partial(records_again, self.command.choice))()

    def _made(self, difference: Difference) -> Job:
        """A job with a key of the difference, so that the same command continues it after a crash."""
        decided = {**self._spec.options, "chunk_bytes": None}
        facts = [difference.key, self._spec.model, self._spec.precision, self._spec.max_errors, decided]
        lacking = difference.taken_from(self._records())
        # The class that was chosen must not be another one when the job is made.
        job = self.submitted(("changes", facts), lacking, hardware=self._spec.hardware)
        self.made(job)
        return job

    def _say_what_is_trusted(self, sources: Sources, difference: Difference) -> None:
        if sources.about is None or sources.confirmed or not difference.unchanged:
            return
        if self._job is None or self._job.status().model_fingerprint is None:
            self.progress.say(
                f"No live worker confirmed that model {self._spec.model} is still the one with fingerprint "
                f"{sources.about.model_fingerprint[:12]}: its vectors were copied on trust"
            )

    def _fill(self, cache: Cache, job: Job) -> None:
        """Put a job's vectors into the cache. They are in a durable file, so an error here costs none of them."""
        try:
            cache.add(job.iter_results(), Contract.of(job.status()))
        except OutputError as error:
            self.progress.say(f"The vectors are written, but not all of them are in the cache: {error}")

    def _report(self, sources: Sources, difference: Difference, status: JobStatus, done: Delivered) -> Report:
        unchanged, cached = sources.copied(difference)
        counts = {
            "unchanged": unchanged,
            "from the cache": cached,
            "encoded": difference.to_encode - done.failed - done.not_encoded,
            "failed": done.failed,
            "not encoded": done.not_encoded,
            "refused": done.refused,
        }
        facts = {
            "id": None if self._job is None else self._job.id,
            "vectors": status.done,
            "dimensions": status.dim,
            "unchanged": unchanged,
            "cached": cached,
            "encoded": difference.to_encode,
            "files": [str(file) for file in done.files],
        }
        return self.report(status.records, counts, status, facts)


def brought_up_to_date(
    broker: Broker, command: JobCommand, progress: JobProgress, made: Callable[[Job], None] = ignore
) -> Report | None:
    """Do what `--sync` or `--cache` asks for; `made` is called with each job. Returns what was done, or None if the
    command writes the vectors of a whole job. A KeyboardInterrupt says that the same command resumes."""
    try:
        if (path := command.updated) is not None:
            return Update(broker, command, progress, made, path).run()
        if (database := command.synced) is not None:
            return Sync(broker, command, progress, made, database).run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command resumes where it stopped") from None
    return None


def to_encode(command: JobCommand, broker: Broker | None) -> Iterator[Record]:
    """Of a corpus, the records that a command would encode. Says on stderr how many these are, if it may copy some.
    Without a Redis, only texts are compared, with the earlier output."""
    choice, path, progress = command.choice, command.updated, command.progress()
    if command.synced is not None and broker is not None:
        return Sync(broker, command, progress, ignore, command.synced).lacking()
    if path is None:
        if command.synced is not None:
            progress.say("Nothing tells which files the model has, so nothing is compared")
        return choice.records()
    with opened_cache(broker, command) as cache:
        if broker is None:
            progress.say("Nothing tells which files the model has: only texts are compared, and not with a cache")
            sources = Sources(earlier_of(command, path, progress.say))
        else:
            sources = sources_of(broker, command, path, cache, progress.say)
        difference = sources.compared(choice.records(), progress.say)
    unchanged, cached = sources.copied(difference)
    progress.say(
        f"{unchanged:,} records are unchanged, {cached:,} are in the cache, {difference.to_encode:,} are to encode"
    )
    return difference.taken_from(records_again(choice))

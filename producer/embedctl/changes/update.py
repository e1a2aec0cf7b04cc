"""An output that is brought up to date: what is unchanged is copied, and a job encodes the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedctl import enqueue
from embedctl.broker import Broker
from embedctl.changes.cache import Cache, Cached, Finder, Hits, answering, key_of
from embedctl.changes.earlier import Earlier
from embedctl.changes.expected import Expected, expected, has_same_name
from embedctl.changes.merged import Merged, OtherVectors
from embedctl.changes.opening import open_earlier
from embedctl.changes.plan import Plan, compare
from embedctl.changes.sources import Sources
from embedctl.destinations.about import About, deciding
from embedctl.destinations.numbers import Numbers
from embedctl.job import Job
from embedctl.job_options import SubmitOptions
from embedctl.records import Record
from embedctl.store import JobSpec, JobStatus
from embedctl_config.errors import OutputError
from embedctl_config.fingerprint import job_fingerprint


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an update did.

    Attributes:
        unchanged: records whose vectors were copied from the earlier output.
        cached: those whose vectors were in the cache.
        encoded: those that a job was made for.
        status: of all records, in the form of a job's.
        job: the id of the job; None if there was none.
        written: the files.
    """

    unchanged: int
    cached: int
    encoded: int
    status: JobStatus
    job: str | None
    written: Sequence[Path]


@dataclass(frozen=True, slots=True)
class _Known:
    """The sources that are used.

    Attributes:
        earlier: an earlier output to compare with.
        copies: whether its vectors may be copied.
        cache: open for writing.
        about: what the copied vectors are; None if nothing tells.
    """

    earlier: Earlier | None
    copies: bool
    cache: Cache | None
    reads_cache: bool
    about: About | None


class Update:
    """Brings one output up to date.

    Args:
        options: of the job. They ask for digests.
        records: reads the corpus from its beginning, each time it is called.
        output: the file to write, which is also the earlier output.
        numbers: how it stores vectors.
        say: takes a sentence for people.
    """

    def __init__(
        self,
        broker: Broker,
        options: SubmitOptions,
        records: Callable[[], Iterator[Record]],
        output: Path,
        sources: Sources,
        numbers: Numbers | None,
        say: Callable[[str], None],
    ) -> None:
        self._broker = broker
        self._spec = enqueue.job_spec(broker, options)
        # The class that was chosen must not be another one when the job is made.
        self._options = dataclasses.replace(options, hardware=self._spec.hardware)
        self._records, self._output, self._sources = records, output, sources
        self._numbers, self._say = numbers, say
        self._expected = expected(broker, self._spec)

    def run(
        self,
        submit: Callable[[Iterator[Record], SubmitOptions], Job],
        write: Callable[[Merged], Sequence[Path]],
    ) -> Outcome:
        """Compare, submit what is new or changed, and write everything.

        Args:
            submit: queues records as a job with these options.
            write: writes the results.

        Raises:
            SettingsError, OutputError, MissingExtra: a source can't be used; nothing is queued.
            InputError: the corpus can't be read, or changes meanwhile.
            EmbedctlError: what `submit` and `write` raise.
        """
        with ExitStack() as stack:
            known = self._known(self._cache(stack))
            try:
                return self._run(known, submit, write)
            except OtherVectors as error:
                self._say(f"{error}: nothing is copied, and all records are encoded")
                alone = dataclasses.replace(known, copies=False, reads_cache=False, about=None)
                return self._run(alone, submit, write)

    def plan(self) -> Plan:
        """Only compare. Raises as :meth:`run`, as far as that compares."""
        with ExitStack() as stack:
            return self._compare(self._known(self._cache(stack)))

    def _cache(self, stack: ExitStack) -> Cache | None:
        if self._sources.cache is None:
            return None
        return stack.enter_context(Cache(self._sources.cache, self._broker.settings.cache_max_bytes))

    def _run(
        self,
        known: _Known,
        submit: Callable[[Iterator[Record], SubmitOptions], Job],
        write: Callable[[Merged], Sequence[Path]],
    ) -> Outcome:
        plan = self._compare(known)
        if plan.earlier is not None:
            plan.earlier.prepare(plan.sources, self._output.absolute().parent)
        job = None
        if plan.to_encode:
            job = submit(plan.difference(self._records()), self._keyed(plan))
        merged = Merged(plan, self._records, self._spec, job, known.about)
        try:
            written = write(merged)
        except OtherVectors:
            assert job is not None
            job.discard()
            raise
        self._say_what_is_trusted(known, plan, job)
        if job is not None and known.cache is not None:
            self._fill(known.cache, job)
        return Outcome(
            plan.unchanged,
            plan.cached,
            plan.to_encode,
            merged.status(),
            None if job is None else job.id,
            written,
        )

    def _known(self, cache: Cache | None) -> _Known:
        """Open the sources, and see which of them have vectors for this job."""
        earlier = self._opened()
        why_not = (
            ""
            if earlier is None
            else self._expected.differs(earlier.about, same_name=has_same_name(self._broker, earlier.about, self._spec))
        )
        if earlier is not None and why_not:
            self._say(f"{earlier.name} is not used, because {why_not}: all records are encoded")
        about = _about(self._spec, self._expected)
        if earlier is not None and not why_not:
            about = earlier.about
        reads_cache = cache is not None and not self._sources.force
        if reads_cache and about is None:
            self._say(f"The cache is not read, because no live worker tells which files model {self._spec.model} has")
            reads_cache = False
        return _Known(earlier, earlier is not None and not why_not, cache, reads_cache, about)

    def _opened(self) -> Earlier | None:
        if not self._sources.earlier or self._sources.force:
            return None
        found = open_earlier(self._output, self._numbers)
        if found is None:
            self._say(f"{self._output} is not there yet, or not whole: all records are new")
        return found

    def _compare(self, known: _Known) -> Plan:
        hits = Hits()
        find = None
        if known.reads_cache:
            assert known.cache is not None
            assert known.about is not None
            precisions = answering(self._spec.precision, at_least=self._sources.at_least)
            find = Finder(known.cache, known.about.fingerprint, precisions, hits)
        names = [known.earlier.name] if known.earlier is not None else []
        names += [str(known.cache.path)] if known.reads_cache and known.cache is not None else []
        if names:
            self._say(f"Comparing the corpus with {' and '.join(names)}")
        return compare(
            self._records(),
            known.earlier,
            find,
            hits,
            copies=known.copies,
        )

    def _keyed(self, plan: Plan) -> SubmitOptions:
        """The options with a key of the difference, so that the same command continues its job after a crash."""
        options = {name: value for name, value in self._spec.options.items() if name != "chunk_bytes"}
        key = plan.key(self._spec.model, self._spec.precision, self._spec.max_errors, options)
        given = self._options.idempotency_key
        return dataclasses.replace(
            self._options, idempotency_key=f"changes-{key}" if given is None else f"{given}-{key}"
        )

    def _say_what_is_trusted(self, known: _Known, plan: Plan, job: Job | None) -> None:
        if known.about is None or not (plan.unchanged or plan.cached) or self._expected.fingerprint is not None:
            return
        if job is None or job.status().model_fingerprint is None:
            self._say(
                f"No live worker confirmed that model {self._spec.model} is still the one with fingerprint "
                f"{known.about.model_fingerprint[:12]}: its vectors were copied on trust"
            )

    def _fill(self, cache: Cache, job: Job) -> None:
        """Put a job's vectors into the cache. They are in a durable file, so an error here costs none of them."""
        status = job.status()
        try:
            fingerprint = job_fingerprint(status.model_fingerprint or "", status.options)
            cache.put(_vectors(job, fingerprint))
        except OutputError as error:
            self._say(f"The vectors are written, but not all of them are in the cache: {error}")


def texts_alone(
    records: Callable[[], Iterator[Record]], sources: Sources, numbers: Numbers | None, output: Path
) -> Plan:
    """Compare a corpus with an earlier output where nothing tells what a job would compute. Raises as
    :meth:`Update.run`."""
    earlier = open_earlier(output, numbers) if sources.earlier and not sources.force else None
    return compare(records(), earlier, None, Hits(), copies=earlier is not None)


def _about(spec: JobSpec, known: Expected) -> About | None:
    """What a job's vectors will be, if live workers agree."""
    if known.fingerprint is None:
        return None
    (model,) = known.models
    return About(known.fingerprint, model, spec.model, spec.precision, deciding(spec.options))


def _vectors(job: Job, fingerprint: str) -> Iterator[tuple[bytes, Cached]]:
    for chunk in job.iter_results():
        # A class with bounds of its own promises something else than its precision.
        if chunk.bounds or chunk.digests is None:
            continue
        failed = {error.position for error in chunk.errors}
        cuts = {cut.position: (cut.used, cut.lost) for cut in chunk.truncations}
        for at, position in enumerate(chunk.positions.tolist()):
            if position not in failed and np.isfinite(chunk.vectors[at]).all():
                key = key_of(fingerprint, chunk.precision, chunk.digests[at].tobytes())
                yield key, (cuts.get(position, (0, 0)), chunk.vectors[at])

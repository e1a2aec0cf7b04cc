"""`--since`, `--cache` and `--digests`, for `run` and `submit`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from embedctl import output
from embedctl.broker import Broker
from embedctl.changes.sources import Sources
from embedctl.cli.bring import Brought, bring
from embedctl.corpus import BatchCorpus
from embedctl.drain.places import Place
from embedctl.enqueue import JobOptions
from embedctl.job import Job
from embedctl.records import Record
from embedctl.results import ChunkVectors
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import InputError, JobError, JobNotFound, JobStalled, SettingsError
from embedctl_config.printable import printable

if TYPE_CHECKING:
    from embedctl.changes.merged import Merged
    from embedctl.changes.update import Outcome
    from embedctl.cli.corpora import CorpusChoice
    from embedctl.cli.delivery import SinkChoice

#: How often a line tells how much is written (seconds).
_LINE_EVERY_S = 10.0
_NAMES = ("since", "cache", "cache_precision", "digests", "force", "delete_missing")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says about vectors that need not be encoded.

    Attributes:
        digests: whether the output is to hold digests.
        to: the URL of a table that takes what is new and changed; None if there is none.
        delete_missing: whether records that are gone are deleted from it.
    """

    sources: Sources
    digests: bool
    to: str | None = None
    delete_missing: bool = False

    @classmethod
    def taken_from(cls, options: MutableMapping[str, Any], to: str | None) -> Asked:
        """Take these options out of those of a command, and have its job hold digests if one of them needs that.

        Args:
            to: the URL of `--to`.

        Raises:
            click.UsageError: one of them makes no sense without another.
            SettingsError: two of them exclude each other.
        """
        since, cache, precision, digests, force, delete_missing = (options.pop(name) for name in _NAMES)
        # A variable may be meant for other commands.
        if force and since is None and cache is None and _is_typed("force"):
            raise click.UsageError("--force goes with --since or --cache")
        if cache is None and _is_typed("cache_precision"):
            raise click.UsageError("--cache-precision goes with --cache")
        if cache is not None and to is not None:
            raise SettingsError(
                "vectors from the cache would be in the file and not in the table of --to: omit --cache"
            )
        brings = since is not None and to is not None
        if delete_missing and not brings and _is_typed("delete_missing"):
            raise click.UsageError("--delete-missing goes with --since and --to")
        # A record under another id is another row of a table, also if its text was there before.
        sources = Sources(since, cache, precision == "at-least", force, same_ids=brings)
        asked = cls(sources, digests or bool(since or cache), to if brings else None, brings and delete_missing)
        if asked.digests:
            options["digests"] = True
        return asked

    @property
    def copies(self) -> bool:
        """Whether vectors may come from elsewhere than from a job."""
        return self.sources.since is not None or self.sources.cache is not None

    def named(self) -> dict[str, Any]:
        """The options that name a command, if they are given."""
        given = {
            "since": self.sources.since,
            "cache": self.sources.cache,
            "force": self.sources.force,
            "delete_missing": self.delete_missing,
        }
        return {name: value for name, value in given.items() if value}

    def check(self, choice: CorpusChoice, path: Path | Place | None) -> None:
        """Check that this can be done with a corpus and an output.

        Raises:
            SettingsError, InputError: it can't; the message says why.
        """
        if not self.digests:
            return
        if isinstance(choice.corpus, BatchCorpus):
            raise SettingsError("a batch file is answered request by request: omit --since, --cache and --digests")
        if isinstance(path, Path) and not self.copies and output.guess_format(path) == "jsonl":
            raise SettingsError(f"{path} has no room for digests: name the output .parquet or .npy, or omit --digests")
        if not self.copies:
            return
        if path is None or isinstance(path, Place):
            raise SettingsError("--since and --cache copy vectors into a file: name it with -o, such as -o new.parquet")
        if not choice.corpus.rereadable:
            raise InputError(
                "--since and --cache read the corpus more than once, and standard input can't be: save it to a file"
            )
        if choice.options.drain or choice.options.resume is not None:
            raise SettingsError(
                "--since and --cache make their own job, and the same command continues it: omit --drain and --resume"
            )
        if self.sources.since is not None and choice.corpus.limit is not None:
            raise SettingsError("with --limit, all other records would look deleted: omit --since or --limit")
        if self.to is not None and output.is_stdout(path):
            raise SettingsError(
                "with --since and --to, name a file with -o: the next run tells by it what is in the table"
            )
        if self.delete_missing and self.sources.force:
            raise SettingsError("--force compares nothing, so it finds nothing missing: omit it or --delete-missing")

    def applies(self, choice: CorpusChoice, path: Path | Place | None) -> bool:
        """Whether the command is an update of one file."""
        if self.copies:
            return True
        # A file that is written with digests holds the same bytes, whatever is copied into it later.
        return self.digests and isinstance(path, Path) and choice.corpus.rereadable and choice.options.resume is None


def update(
    broker: Broker,
    choice: CorpusChoice,
    asked: Asked,
    path: Path,
    progress: JobProgress,
    submit: Callable[..., Job],
    *,
    numbers: output.Numbers | None,
    clobber: bool,
    made: Callable[[Job], None] = lambda _: None,
    sink: SinkChoice | None = None,
) -> Outcome:
    """Write the vectors of a corpus, and encode only those that are not known.

    Args:
        sink: takes those that were encoded, before the file gets its name.
        submit: :func:`submit_choice`.
        made: called with the job, if there is one.

    Raises:
        KeyboardInterrupt: says that the same command continues.
    """
    from embedctl.changes.update import Update  # here, because most commands compare nothing

    jobs: list[Job] = []
    brought: list[Brought] = []
    reads = iter((choice.records,))

    def records() -> Iterator[Record]:
        """The first time, lines that are skipped are listed."""
        return next(reads, partial(_again, choice))()

    def submitted(some: Iterator[Record], options: JobOptions) -> Job:
        first = next(some)  # there is one, and a corpus that changed is noticed before a job is made
        every = _with(first, some)
        job = submit(broker, dataclasses.replace(choice, options=options), progress, path, numbers, records=every)
        jobs.append(job)
        made(job)
        return job

    def write(results: Merged) -> list[Path]:
        if not jobs:
            progress.say("No text is new or changed: nothing is encoded")
        if sink is not None:
            # Until the file is replaced, the same command finds the same difference, whatever happens.
            brought.append(bring(sink, results, jobs[-1] if jobs else None, path, broker, progress))
        tells = _Tells(progress.say, results.status().records)
        found = output.fetch(results, path, progress=progress.running, written=tells, clobber=clobber, numbers=numbers)
        for job in jobs[-1:]:
            job.wait(progress=progress.running)
        return found

    try:
        work = Update(broker, choice.options, records, path, asked.sources, numbers, progress.say)
        outcome = work.run(submitted, write)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues where it stopped") from None
    except (JobNotFound, JobStalled):  # nothing is left to free, or the same command continues
        raise
    except JobError:
        for job in jobs[-1:]:
            with suppress(JobNotFound):
                job.discard()
        raise
    for job in jobs[-1:]:
        job.discard()  # its vectors are in the file, and the next command has another difference
    return dataclasses.replace(outcome, **dataclasses.asdict(brought[-1])) if brought else outcome


class _Tells:
    """Says now and then how much is written: what is copied shows no other progress."""

    def __init__(self, say: Callable[[str], None], records: int) -> None:
        self._say, self._records = say, records
        self._next = time.monotonic() + _LINE_EVERY_S

    def __call__(self, chunk: ChunkVectors) -> None:
        if time.monotonic() >= self._next and len(chunk.positions):
            self._next = time.monotonic() + _LINE_EVERY_S
            self._say(f"{int(chunk.positions[-1]) + 1:,} of {self._records:,} records written")


def to_encode(
    choice: CorpusChoice, asked: Asked, path: Path | Place | None, numbers: output.Numbers | None, broker: Broker | None
) -> Iterator[Record]:
    """Of a corpus, the records that a command would encode. Says on stderr how many these are, if it may copy some.

    Args:
        broker: None if there is no Redis; then only texts are compared, with the earlier output.
    """
    if not asked.copies or not isinstance(path, Path):
        return choice.records()
    from embedctl.changes.update import Update, texts_alone  # here, because most commands compare nothing

    def say(line: str) -> None:
        click.echo(printable(line), err=True)

    if broker is None:
        plan = texts_alone(choice.records, asked.sources, numbers, path)
        say("Nothing tells which files the model has: only texts are compared, and not with a cache")
    else:
        plan = Update(broker, choice.options, choice.records, path, asked.sources, numbers, say).plan()
    say(f"{plan.unchanged:,} records are unchanged, {plan.cached:,} are in the cache, {plan.to_encode:,} are to encode")
    return plan.difference(_again(choice))


def _is_typed(name: str) -> bool:
    """Whether an option stands on the command line, rather than in a variable."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _again(choice: CorpusChoice) -> Iterator[Record]:
    """The records once more; lines that were skipped are not listed again."""
    skipped = (lambda *_: None) if choice.skip_bad_lines else None
    return choice.corpus.records(skipped)


def _with(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from islice(rest, None)

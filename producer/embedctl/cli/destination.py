"""Where vectors go: to a file, into the parts of a folder, or into a database."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click

from embedctl.cli.delivery import DatabaseChoice
from embedctl.cli.options import option, together
from embedctl.corpus.batch import BatchCorpus
from embedctl.corpus.reading import Corpus
from embedctl.destinations.answers import is_of_batch
from embedctl.destinations.draining import Move
from embedctl.destinations.files import Readable, fetch
from embedctl.destinations.formats import (
    FORMATS,
    check_output,
    followed,
    format_of,
    guess_format,
    refuse_outputs,
    with_room_for,
)
from embedctl.destinations.jsonl import is_stdout
from embedctl.destinations.keyed import deliver, release
from embedctl.destinations.loop import Callbacks, Delivered, Refused
from embedctl.destinations.numbers import Dtype, Numbers, load_ranges, numbers_of
from embedctl.destinations.place import MANIFEST, Place, place_of
from embedctl.destinations.registry import destination_of, is_database
from embedctl.jobs.enqueue import begun_before
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.terminal.progress import JobProgress
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import UnusableOutput
from embedctl_config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = ("output", "duplicates", "dtype", "ranges", "no_clobber")


class DatabaseUrl(str):
    """The URL of a database's table, as it was given."""


class _Output(click.Path):
    """Where vectors go: a DatabaseUrl, a Place for parts if it ends in a slash or names a bucket, else a Path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            if is_database(value):
                return DatabaseUrl(value)
            if value.endswith("/") or "://" in value:
                return place_of(value)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        return path if is_stdout(path) else followed(path)


def destination_options(duplicates: Iterable[str], if_same: str) -> Callable[[F], F]:
    """The options of a :class:`Destination`. `--duplicates` takes these words; `if_same` explains them in its help."""
    return together(
        option(
            "--output",
            "-o",
            type=_Output(path_type=Path, dir_okay=False, allow_dash=True),
            metavar="FILE|DIR/|URL",
            help=f"The file for the vectors, in the format of its suffix: .{', .'.join(FORMATS)}; or - for "
            "standard output (jsonl); or DIR/ or s3://BUCKET/PREFIX/, for parts; the vectors are then no longer in "
            "Redis; or the URL of a database's table, which takes each record under its id, such as "
            "lancedb:///FOLDER?table=NAME. `embedctl destinations` lists the databases.",
        ),
        option("--duplicates", type=click.Choice([str(each) for each in duplicates]), help=if_same),
        option(
            "--dtype",
            type=click.Choice([str(kind) for kind in Dtype]),
            help="The type of the numbers in .npy, .parquet, parts and databases (there, no int8). binary: a bit for "
            "each component, whether it is above 0. Default: float32, or that of the job's parts.",
        ),
        option(
            "--ranges",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="For int8: a .npy with the lowest and the highest value of each component (2 × dimensions). Default: "
            "those of the job's parts, or of the first 100,000 records.",
        ),
        option("--no-clobber", is_flag=True, help="Fail at once if a file to write exists already."),
    )


@dataclass(frozen=True, slots=True)
class Destination:
    """Where vectors go and how, from the command line: to `path`, which is a file, or a folder for parts; or to a
    database; or to neither. `numbers` is None if that is left open."""

    path: Path | Place | None
    database: DatabaseChoice | None
    numbers: Numbers | None
    clobber: bool

    @classmethod
    def taken_from(cls, given: MutableMapping[str, Any], settings: Settings) -> Destination:
        """Take these options out of those of a command. A database can be reached. click.UsageError: an option makes no
        sense without another, or two exclude each other. SettingsError, MissingExtra, OutputError: the ranges can't be
        read, or the database can't be used."""
        path, duplicates, dtype, ranges, no_clobber = map(given.pop, _NAMES)
        numbers = numbers_of(dtype, None if ranges is None else load_ranges(ranges))
        if isinstance(path, DatabaseUrl):
            if no_clobber or ranges is not None:
                raise click.UsageError("--no-clobber and --ranges are for files: omit them.")
            database = DatabaseChoice.of(settings, str(path), duplicates, dtype)
            return cls(None, database, numbers, not no_clobber)
        if duplicates is not None:
            raise click.UsageError(f"--duplicates {duplicates} is for the URL of a database: omit it")
        return cls(path, None, numbers, not no_clobber)

    @property
    def is_given(self) -> bool:
        return self.path is not None or self.database is not None

    @property
    def may_move(self) -> bool:
        """Whether a line of progress may move meanwhile: not below records on the same terminal."""
        if not isinstance(self.path, Path) or not is_stdout(self.path):
            return True
        if sys.stdout is None or not sys.stdout.isatty() or not sys.stderr.isatty():
            return True
        return not os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())

    def check(self, options: SubmitOptions | None = None, *, as_json: bool, is_batch: bool = False) -> None:
        """Check beforehand that what a job with these options gives can go there, if anything is named, and that a JSON
        value may be printed too. Raises as :func:`check_output`, and click.UsageError if both would be printed."""
        if isinstance(self.path, Place):
            self.path.check()  # first, because the extra s3 has all that its parts need
            import_module("embedctl.destinations.part")  # raises MissingExtra without pyarrow
            if not self.clobber and MANIFEST in self.path.sizes():
                raise UnusableOutput(f"{self.path.name} holds the parts of a job: choose another folder, or remove it")
        elif self.path is not None:
            if as_json and is_stdout(self.path):
                raise click.UsageError(
                    "--json and --output - both print to standard output: name a file, or omit --json"
                )
            keep = () if options is None else options.keep
            check_output(self.path, keep, clobber=self.clobber, numbers=self.numbers, batch=is_batch)
            if options is not None:
                refuse_outputs(self.path, guess_format(self.path), options.outputs)
        elif self.database is not None and options is not None:
            self.database.table.refuse_outputs(options.outputs)

    def check_owner(self, broker: Broker, options: SubmitOptions) -> None:
        """Check, before anything is queued, that what is there is of a job that is made, or gone on with, with these
        options: parts of no other job, and a table of no other model, as far as the settings or live workers tell the
        model's files. Raises UnusableOutput or OtherContract."""
        if isinstance(self.path, Place):
            from embedctl.destinations.part_list import check_own  # here, because it needs pyarrow

            for name in islice(self.path.sizes(), 1):
                check_own(self.path, name, begun_before(broker, options))
        elif self.database is not None and options.resume is None:
            self.database.check_contract(broker, options)

    def checked(self, corpus: Corpus | BatchCorpus) -> Destination:
        """The same destination, after a look at the ids of a corpus; see :meth:`DatabaseChoice.checked`."""
        return self if self.database is None else replace(self, database=self.database.checked(corpus))

    def draining(self, refused: Refused) -> Move | None:
        """What moves a job's results here while it is submitted; None if they stay in Redis. Those records that a
        database refuses are told at the end."""
        if self.database is None and not isinstance(self.path, Place):
            return None

        def drain(waiter: Waiter, stopped: Callable[[], bool]) -> None:
            if self.database is None:
                self._delivered(waiter, Callbacks(refused=refused, stopped=stopped))
            else:
                table = destination_of(self.database.url, waiter.broker.settings)  # the other one is used later
                release(waiter, table, self.database.options, Callbacks(stopped=stopped))

        return drain

    def save(
        self,
        job: Readable,
        broker: Broker,
        progress: JobProgress,
        *,
        file_format: str | None = None,
        requests: BatchCorpus | None = None,
    ) -> Delivered:
        """Write a job's vectors as they come, and show the progress of both. Refused records are listed. Vectors in the
        parts of a folder leave Redis. `requests` is the batch file that the job was made of, if the file answers it. A
        KeyboardInterrupt says how to return to the job."""
        if not self.is_given:
            return Delivered()
        progress.begin_writing()
        try:
            if isinstance(self.path, Path):
                done = fetch(
                    job,
                    self.path,
                    progress.callbacks,
                    file_format=file_format,
                    clobber=self.clobber,
                    numbers=self.numbers,
                    requests=None if requests is None else requests.requests,
                )
            else:
                done = self._delivered(Waiter(job.id, broker), progress.callbacks)
            status = job.wait(progress=progress.running)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"job {job.id} goes on: embedctl fetch {job.id} -o {self._again}") from None
        self._report(done, status, progress)
        return done

    def _delivered(self, waiter: Waiter, callbacks: Callbacks) -> Delivered:
        if self.database is not None:
            return deliver(waiter, self.database.table, self.database.options, callbacks)
        from embedctl.destinations.parts import drain  # here, because it needs pyarrow

        assert isinstance(self.path, Place)
        return drain(waiter, self.path, callbacks, numbers=self.numbers)

    def _report(self, done: Delivered, status: JobStatus, progress: JobProgress) -> None:
        if self.database is not None:
            if done.left_out:
                progress.say(f"{done.left_out:,} records were left out, because another record has their id")
            there = f"; {done.unchanged:,} were there already" if done.unchanged else ""
            refused = f"; {done.refused:,} were refused" if done.refused else ""
            progress.say(f"Wrote {done.written:,} records to {self.database.url}{there}{refused}")
        elif isinstance(self.path, Place):
            progress.say(f"Wrote {len(done.files) - 1:,} parts and {MANIFEST} into {self.path.name}")
        elif done.files:
            progress.say("Wrote " + ", ".join(map(str, done.files)))
        kept = status.options.get("keep")
        if isinstance(self.path, Path) and kept and not format_of(self.path).kept_fields and not is_of_batch(status):
            others = with_room_for("kept_fields")
            progress.say(f"Not in {self.path}: the kept fields ({', '.join(kept)}). Fetch into a {others} to get them")

    @property
    def _again(self) -> str:
        """What `-o` of the command is that resumes."""
        if self.database is not None:
            return f"'{self.database.url}'" + (" --duplicates position" if self.database.options.positions else "")
        if not isinstance(self.path, Place):
            return str(self.path)
        return self.path.path_of("") + ("" if self.numbers is None else f" --dtype {self.numbers.kind}")

"""Where vectors go: to a file, into the parts of a folder, or into a database."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from embedctl import output
from embedctl.broker import Broker
from embedctl.cli.delivery import SinkChoice
from embedctl.cli.options import option, together
from embedctl.corpus import BatchCorpus, Corpus
from embedctl.drain.places import MANIFEST, Place, place_of
from embedctl.job import Job
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import OutputError
from embedctl_config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = ("output", "to", "duplicates", "allow_mixed", "one_file", "output_type", "ranges", "no_clobber")


class _Output(click.Path):
    """A path for vectors: a Place for parts if it ends in a slash or is a URL, else a Path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (value.endswith("/") or "://" in value):
            return place_of(value)
        return super().convert(value, param, ctx)


def destination_options(duplicates: Iterable[str], if_same: str) -> Callable[[F], F]:
    """The options of a :class:`Destination`.

    Args:
        duplicates: the words that `--duplicates` takes.
        if_same: what its help says of them.
    """
    return together(
        option(
            "--output",
            "-o",
            type=_Output(path_type=Path, dir_okay=False, allow_dash=True),
            help=f"The file for the vectors, in the format of its suffix: .{', .'.join(output.FORMATS)}; or - for "
            "standard output (jsonl); or DIR/ or s3://BUCKET/PREFIX/, for parts; the vectors are then no longer in "
            "Redis.",
        ),
        option(
            "--to",
            metavar="URL",
            help="In place of --output, the table of a database that takes each record under its id, such as "
            "lancedb:///FOLDER?table=NAME. `embedctl sinks` lists the databases.",
        ),
        option("--duplicates", type=click.Choice([str(each) for each in duplicates]), help=if_same),
        option(
            "--allow-mixed",
            is_flag=True,
            help="For --to: write into a table that holds another model's vectors, or records of unknown origin.",
        ),
        option(
            "--one-file",
            is_flag=True,
            help="Of a batch file, write failed requests to the same file. Default: to NAME.errors.jsonl.",
        ),
        option(
            "--output-type",
            type=click.Choice([str(kind) for kind in output.OutputType]),
            help="The type of the numbers in .npy, .parquet and parts. ubinary: a bit for each component, whether it "
            "is above 0. Default: float32, or that of the job's parts.",
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
    """Where vectors go and how, from the command line.

    Attributes:
        path: a file, or a folder for parts; None if there is only a database, or nothing.
        sink: a database; None if there is none.
        numbers: how a file or parts store vectors; None if that is left open.
        clobber: whether files that exist may be replaced.
        one_file: whether failed requests of a batch file go to the file of the others.
    """

    path: Path | Place | None
    sink: SinkChoice | None
    numbers: output.Numbers | None
    clobber: bool
    one_file: bool

    @classmethod
    def taken_from(
        cls,
        given: MutableMapping[str, Any],
        settings: Settings,
        *,
        is_update: bool = False,
        delete_missing: bool = False,
    ) -> Destination:
        """Take these options out of those of a command. A database can be reached.

        Args:
            is_update: whether both a file and a database are brought up to date.
            delete_missing: whether records that are gone are then deleted from the database.

        Raises:
            click.UsageError: an option makes no sense without another, or two exclude each other.
            SettingsError, MissingExtra, OutputError: the ranges can't be read, or the database can't be used.
        """
        path, to, duplicates, allow_mixed, one_file, output_type, ranges, no_clobber = map(given.pop, _NAMES)
        numbers, sink = _numbers(output_type, ranges), None
        if to is not None:
            if path is not None and not is_update:
                raise click.UsageError("--output and --to exclude each other without --since: omit one")
            sink = SinkChoice.of(
                settings, to, duplicates, output_type, allow_mixed, is_update=is_update, delete_missing=delete_missing
            )
        elif allow_mixed or duplicates is not None:
            name = "--allow-mixed" if allow_mixed else f"--duplicates {duplicates}"
            raise click.UsageError(f"{name} is for --to URL: omit it")
        return cls(path, sink, numbers, not no_clobber, one_file)

    @property
    def is_given(self) -> bool:
        """Whether there is any."""
        return self.path is not None or self.sink is not None

    @property
    def may_move(self) -> bool:
        """Whether a line of progress may move meanwhile: not below records on the same terminal."""
        if not isinstance(self.path, Path) or not output.is_stdout(self.path):
            return True
        if sys.stdout is None or not sys.stdout.isatty() or not sys.stderr.isatty():
            return True
        return not os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())

    def check(self, keep: Sequence[str] = (), *, as_json: bool, is_batch: bool = False) -> None:
        """Check beforehand that vectors can go to the path, if there is one, and that a JSON value may be printed too.

        Args:
            keep: the kept fields that are to come out beside the vectors.
            is_batch: whether they are of a batch file.

        Raises:
            click.UsageError: both would be printed.
            SettingsError, OutputError, MissingExtra: as for :func:`output.check_output`.
        """
        if isinstance(self.path, Place):
            self._check_folder(self.path)
        elif self.path is not None:
            if as_json and output.is_stdout(self.path):
                raise click.UsageError(
                    "--json and --output - both print to standard output: name a file, or omit --json"
                )
            batch = is_batch and not self.one_file
            output.check_output(self.path, keep, clobber=self.clobber, numbers=self.numbers, batch=batch)

    def _check_folder(self, folder: Place) -> None:
        folder.check()  # first, because the extra s3 has all that its parts need
        import_module("embedctl.drain.part")  # raises MissingExtra without pyarrow
        if not self.clobber and MANIFEST in folder.names():
            raise OutputError(f"{folder.name} holds the parts of a job: choose another folder, or remove it")

    def checked(self, corpus: Corpus | BatchCorpus) -> Destination:
        """The same destination, after a look at the ids of a corpus; see :meth:`SinkChoice.checked`."""
        return self if self.sink is None else replace(self, sink=self.sink.checked(corpus))

    def save(
        self,
        job: Job,
        broker: Broker,
        progress: JobProgress,
        *,
        file_format: str | None = None,
        requests: BatchCorpus | None = None,
    ) -> Sequence[Path | str]:
        """Write a job's vectors as they come, and show the progress of both. Vectors in the parts of a folder leave
        Redis. Returns the files.

        Args:
            file_format: as for :func:`output.fetch`.
            requests: the batch file that the job was made of, if the file answers it.

        Raises:
            KeyboardInterrupt: says how to return to the job.
        """
        if self.sink is not None:
            self.sink.save(job, broker, progress)
            return ()
        progress.begin_writing()
        if isinstance(self.path, Place):
            return self._save_parts(job, self.path, progress)
        return () if self.path is None else self._save_file(job, self.path, progress, file_format, requests)

    def _save_file(
        self, job: Job, path: Path, progress: JobProgress, file_format: str | None, requests: BatchCorpus | None
    ) -> list[Path]:
        try:
            written = output.fetch(
                job,
                path,
                file_format=file_format,
                one_file=self.one_file,
                progress=progress.running,
                written=progress.written,
                clobber=self.clobber,
                numbers=self.numbers,
                requests=None if requests is None else requests.requests,
            )
            status = job.wait(progress=progress.running)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"job {job.id} goes on: embedctl fetch {job.id} -o {path}") from None
        if written:
            progress.say("Wrote " + ", ".join(map(str, written)))
        kept = status.options.get("keep")
        if kept and not output.holds_kept_fields(path) and not output.is_of_batch(status):
            progress.say(
                f"Not in {path}: the kept fields ({', '.join(kept)}). Fetch into a .jsonl or .parquet to get them"
            )
        return written

    def _save_parts(self, job: Job, folder: Place, progress: JobProgress) -> list[str]:
        kind, ranges = (None, None) if self.numbers is None else (self.numbers.kind, self.numbers.ranges)
        try:
            written = job.drain(
                folder.name, progress.running, written=progress.written, output_type=kind, ranges=ranges
            )
        except KeyboardInterrupt:
            same = "" if kind is None else f" --output-type {kind}"
            raise KeyboardInterrupt(
                f"job {job.id} goes on: embedctl fetch {job.id} -o {folder.path_of('')}{same}"
            ) from None
        progress.say(f"Wrote {len(written) - 1:,} parts and {MANIFEST} into {folder.name}")
        return written


def _numbers(output_type: str | None, ranges: Path | None) -> output.Numbers | None:
    if ranges is not None and output_type != output.OutputType.INT8:
        raise click.UsageError("--ranges is for --output-type int8")
    if output_type is None:
        return None
    return output.Numbers(output.OutputType(output_type), None if ranges is None else output.load_ranges(ranges))

"""`--sync`, `--cache` and what goes with them, on the command line: vectors that need not be encoded."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedctl.cli.options import option, together
from embedctl.corpus.batch import BatchCorpus
from embedctl.destinations.formats import format_of, with_room_for
from embedctl.destinations.ids import Duplicates
from embedctl.destinations.place import Place
from embedctl.jobs.options import parse_budget
from embedctl.sync.comparison import Limit
from embedctl_config.errors import InputError, SettingsError

if TYPE_CHECKING:
    from embedctl.cli.corpora import CorpusChoice
    from embedctl.cli.destination import Destination

_NAMES = ("sync", "delete", "delete_at_most", "cache")
#: Of the rows, unless the command says otherwise: a corpus that lost a file must not empty a database.
_AT_MOST = "10%"

sync_options = together(
    option(
        "--sync",
        is_flag=True,
        help="Make the .parquet, the .npy or the table of --output what the corpus says. It is asked what it holds, "
        "and only what it lacks is encoded.",
    ),
    # Without variables, so that nothing is deleted because of one.
    click.option(
        "--delete", is_flag=True, help="With --sync of a table: delete its rows whose ids the corpus does not have."
    ),
    click.option(
        "--delete-at-most",
        metavar="N|N%",
        default=_AT_MOST,
        show_default=True,
        help="With --delete: delete nothing if more rows than this would go.",
    ),
    option(
        "--cache",
        metavar="FILE",
        help="A file, or sqlite:///FILE, of vectors by text: what it has is not encoded, and what is encoded is added.",
    ),
)


@dataclass(frozen=True, slots=True)
class SyncChoice:
    """Whether a destination, perhaps a file, is to become what the corpus says, and what need not be encoded. `deletes`
    is how many rows of a database may be deleted at most; None if none may."""

    is_asked: bool
    of_file: bool
    deletes: Limit | None
    cache: str | None

    @classmethod
    def taken_from(cls, given: MutableMapping[str, Any], *, to_database: bool) -> SyncChoice:
        """Take these options out of those of a command. click.UsageError: one makes no sense without another.
        SettingsError: the limit is none."""
        sync, delete, at_most, cache = map(given.pop, _NAMES)
        of_file = sync and not to_database
        if delete and not sync:
            raise click.UsageError("--delete goes with --sync")
        if at_most != _AT_MOST and not delete:
            raise click.UsageError("--delete-at-most goes with --delete")
        number, share = parse_budget(at_most, "--delete-at-most")
        limit = Limit(number or 0, share) if delete else None
        return cls(sync, of_file, limit, cache)

    @property
    def copies(self) -> bool:
        """Whether vectors of a file may come from elsewhere than from a job."""
        return self.of_file or self.cache is not None

    def named(self) -> dict[str, Any]:
        """The options that name a command, if they are given."""
        given = {"sync": self.is_asked, "cache": self.cache}
        return {name: value for name, value in given.items() if value}

    def check(self, choice: CorpusChoice, destination: Destination) -> None:
        """Check that this can be done with a corpus and a destination; SettingsError or InputError says why not."""
        if not (self.is_asked or self.copies):
            return
        if isinstance(choice.corpus, BatchCorpus):
            raise SettingsError("a batch file is answered request by request: omit --sync and --cache")
        path, database, limit = destination.path, destination.database, choice.corpus.limit
        if isinstance(path, Place):
            raise SettingsError(
                "parts stay as one job has written them: with --sync or --cache, name a .parquet, a .npy or a table "
                "with -o"
            )
        if self.copies and not isinstance(path, Path):
            raise SettingsError("--sync and --cache copy vectors into a file: name it with -o, such as -o new.parquet")
        if self.of_file and isinstance(path, Path) and not format_of(path).digests:
            others = with_room_for("digests")
            raise SettingsError(f"{path} has no room for digests: name the output {others}, or omit --sync")
        if not choice.corpus.rereadable:
            raise InputError(
                "--sync and --cache read the corpus more than once, and standard input can't be: save it to a file"
            )
        if choice.options.drain or choice.options.resume is not None:
            raise SettingsError(
                "--sync and --cache make their own job, and the same command resumes it: omit --drain and --resume"
            )
        if self.of_file and self.deletes is not None:
            raise SettingsError("a file has the records of the corpus and no others: omit --delete")
        if self.of_file and limit is not None:
            raise SettingsError("with --limit, the vectors of all other records would go: omit --sync or --limit")
        if self.is_asked and database is not None and database.options.duplicates is not Duplicates.ERROR:
            raise SettingsError("with --sync, the table has one row for each id of the corpus: omit --duplicates")
        if self.deletes is not None and limit is not None:
            raise SettingsError("with --limit, all other rows would look deleted: omit --delete or --limit")

"""`--sync` and what goes with it, on the command line."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from embedctl.cli.options import option, together
from embedctl.corpus import BatchCorpus
from embedctl.destinations.ids import Duplicates
from embedctl.job_options import parse_budget
from embedctl_config.errors import InputError, SettingsError

if TYPE_CHECKING:
    from embedctl.cli.corpora import CorpusChoice
    from embedctl.cli.destination import Destination
    from embedctl.destinations.sync import Limit

_NAMES = ("sync", "delete", "delete_at_most")
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
)


@dataclass(frozen=True, slots=True)
class SyncChoice:
    """Whether a database is to become what the corpus says.

    Attributes:
        deletes: how many rows may be deleted at most; None if none may.
    """

    is_asked: bool
    deletes: Limit | None

    @classmethod
    def taken_from(cls, given: MutableMapping[str, Any]) -> SyncChoice:
        """Take these options out of those of a command.

        Raises:
            click.UsageError: one of them makes no sense without another.
            SettingsError: the limit is none.
        """
        from embedctl.destinations.sync import Limit  # here, because most commands compare nothing

        sync, delete, at_most = map(given.pop, _NAMES)
        if delete and not sync:
            raise click.UsageError("--delete goes with --sync")
        if at_most != _AT_MOST and not delete:
            raise click.UsageError("--delete-at-most goes with --delete")
        number, share = parse_budget(at_most, "--delete-at-most")
        return cls(sync, Limit(number or 0, share) if delete else None)

    def check(self, choice: CorpusChoice, destination: Destination) -> None:
        """Check that this can be done with a corpus and a destination.

        Raises:
            SettingsError, InputError: it can't; the message says why.
        """
        if not self.is_asked:
            return
        if destination.database is None:
            if self.deletes is not None:
                raise SettingsError("a file has the records of the corpus and no others: omit --delete")
            return
        if isinstance(choice.corpus, BatchCorpus):
            raise SettingsError("a batch file is answered request by request: omit --sync")
        if destination.database.options.duplicates is not Duplicates.ERROR:
            raise SettingsError("with --sync, the table has one row for each id of the corpus: omit --duplicates")
        if not choice.corpus.rereadable:
            raise InputError("--sync reads the corpus more than once, and standard input can't be: save it to a file")
        if choice.options.resume is not None:
            raise SettingsError("--sync makes its own job, and the same command resumes it: omit --resume")
        if self.deletes is not None and choice.corpus.limit is not None:
            raise SettingsError("with --limit, all other rows would look deleted: omit --delete or --limit")

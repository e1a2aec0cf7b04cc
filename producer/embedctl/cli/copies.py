"""`--cache`, `--digests`, and `--sync` of a file: vectors that need not be encoded."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from embedctl.changes.sources import Sources
from embedctl.cli.corpora import CorpusChoice
from embedctl.cli.options import option, together
from embedctl.corpus import BatchCorpus
from embedctl.destinations.formats import guess_format
from embedctl.destinations.place import Place
from embedctl_config.errors import InputError, SettingsError

_NAMES = ("cache", "cache_precision", "digests", "force")

copy_options = together(
    option(
        "--cache",
        metavar="FILE",
        help="A file, or sqlite:///FILE, of vectors by text: what it has is not encoded, and what is encoded is added.",
    ),
    option(
        "--cache-precision",
        type=click.Choice(["exact", "at-least"]),
        default="exact",
        show_default=True,
        help="at-least: the cache may also answer with vectors of a better precision, such as fp32 for fp16.",
    ),
    option(
        "--digests",
        is_flag=True,
        help="Write the SHA-256 of each text beside its vector, which --sync needs next time. Implied by --sync and "
        "--cache.",
    ),
    option("--force", is_flag=True, help="Encode everything, whatever --sync and --cache have."),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says about vectors that need not be encoded.

    Attributes:
        digests: whether the output, and so the job, is to hold digests.
    """

    sources: Sources
    digests: bool

    @classmethod
    def taken_from(cls, given: MutableMapping[str, Any], *, syncs_file: bool) -> Asked:
        """Take these options out of those of a command.

        Args:
            syncs_file: whether a file is to become what the corpus says.

        Raises:
            click.UsageError: one of them makes no sense without another.
            SettingsError: two of them exclude each other.
        """
        cache, precision, digests, force = map(given.pop, _NAMES)
        # A variable may be meant for other commands.
        if force and not syncs_file and cache is None and _is_typed("force"):
            raise click.UsageError("--force goes with --cache, or with --sync of a file")
        if cache is None and _is_typed("cache_precision"):
            raise click.UsageError("--cache-precision goes with --cache")
        return cls(Sources(syncs_file, cache, precision == "at-least", force), digests or syncs_file or bool(cache))

    @property
    def copies(self) -> bool:
        """Whether vectors may come from elsewhere than from a job."""
        return self.sources.earlier or self.sources.cache is not None

    def named(self) -> dict[str, Any]:
        """The options that name a command, if they are given."""
        given = {
            "cache": self.sources.cache,
            "force": self.sources.force,
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
            raise SettingsError("a batch file is answered request by request: omit --sync, --cache and --digests")
        if isinstance(path, Path) and self.sources.cache is None and guess_format(path) == "jsonl":
            raise SettingsError(
                f"{path} has no room for digests: name the output .parquet or .npy, or omit --digests and --sync"
            )
        if not self.copies:
            return
        if path is None or isinstance(path, Place):
            raise SettingsError("--sync and --cache copy vectors into a file: name it with -o, such as -o new.parquet")
        if not choice.corpus.rereadable:
            raise InputError(
                "--sync and --cache read the corpus more than once, and standard input can't be: save it to a file"
            )
        if self.sources.earlier and choice.corpus.limit is not None:
            raise SettingsError("with --limit, the vectors of all other records would go: omit --sync or --limit")
        if choice.options.drain or choice.options.resume is not None:
            raise SettingsError(
                "--sync and --cache make their own job, and the same command resumes it: omit --drain and --resume"
            )

    def applies(self, choice: CorpusChoice, path: Path | Place | None) -> bool:
        """Whether the command is an update of one file."""
        if self.copies:
            return True
        # A file that is written with digests holds the same bytes, whatever is copied into it later.
        return self.digests and isinstance(path, Path) and choice.corpus.rereadable and choice.options.resume is None


def _is_typed(name: str) -> bool:
    """Whether an option stands on the command line, rather than in a variable."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE

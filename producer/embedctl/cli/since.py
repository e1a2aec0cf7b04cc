"""`--since`, `--cache` and `--digests`: vectors that need not be encoded."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from embedctl import output
from embedctl.changes.sources import Sources
from embedctl.cli.corpora import CorpusChoice
from embedctl.cli.options import option, together
from embedctl.corpus import BatchCorpus
from embedctl.destinations.place import Place
from embedctl_config.errors import InputError, SettingsError

_NAMES = ("since", "cache", "cache_precision", "digests", "force")

since_options = together(
    option(
        "--since",
        metavar="FILE|DIR",
        help="An earlier output (.parquet, .npy or a folder of parts). Vectors of its texts are copied; only new "
        "and changed texts are encoded. It may be the .parquet of --output.",
    ),
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
        help="Write the SHA-256 of each text beside its vector, which --since needs next time. Implied by --since and "
        "--cache.",
    ),
    option("--force", is_flag=True, help="Encode everything, whatever --since and --cache have."),
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
    def taken_from(cls, given: MutableMapping[str, Any]) -> Asked:
        """Take these options out of those of a command.

        Raises:
            click.UsageError: one of them makes no sense without another.
            SettingsError: two of them exclude each other.
        """
        since, cache, precision, digests, force = map(given.pop, _NAMES)
        # A variable may be meant for other commands.
        if force and since is None and cache is None and _is_typed("force"):
            raise click.UsageError("--force goes with --since or --cache")
        if cache is None and _is_typed("cache_precision"):
            raise click.UsageError("--cache-precision goes with --cache")
        return cls(Sources(since, cache, precision == "at-least", force), digests or bool(since or cache))

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

    def applies(self, choice: CorpusChoice, path: Path | Place | None) -> bool:
        """Whether the command is an update of one file."""
        if self.copies:
            return True
        # A file that is written with digests holds the same bytes, whatever is copied into it later.
        return self.digests and isinstance(path, Path) and choice.corpus.rereadable and choice.options.resume is None


def _is_typed(name: str) -> bool:
    """Whether an option stands on the command line, rather than in a variable."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE

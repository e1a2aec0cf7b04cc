"""The databases that vectors can be delivered to, and how each is found by a URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from embedctl.destinations.interface import Destination
from embedctl.destinations.urls import DestinationUrl, parse_url
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings

#: Entry points of this group are destinations of other distributions. Their name is the scheme of the URL, and their
#: value is what makes the destination: it takes the URL, which is free of passwords, and opens nothing yet.
GROUP = "embedctl.destinations"
#: Where the secrets of a plug-in belong.
_ELSEWHERE = "set it where the database's client reads it from the environment"


@dataclass(frozen=True, slots=True)
class DatabaseKind:
    """A kind of database.

    Attributes:
        form: of its URL, for people.
        extra: the extra of embedctl that installs its client; empty for a plug-in.
        needs: the modules of that client.
        maker: what makes the destination, as `module:name`.
        password_fix: where its password belongs, as the end of a sentence.
        user_is_allowed: whether its URL may name a user.
        plugin: the distribution that it comes from; empty if that is embedctl.
    """

    name: str
    form: str
    schemes: tuple[str, ...]
    extra: str
    needs: tuple[str, ...]
    maker: str
    password_fix: str = _ELSEWHERE
    user_is_allowed: bool = False
    plugin: str = ""

    @property
    def installed(self) -> bool:
        return all(find_spec(module) is not None for module in self.needs)

    @property
    def install(self) -> str:
        return f"pip install 'embedctl[{self.extra}]'"


BUILT_IN = (
    DatabaseKind(
        "pgvector",
        "postgresql://[USER@]HOST[:PORT]/DATABASE?table=TABLE",
        ("postgresql", "postgres"),
        "pgvector",
        ("psycopg",),
        "embedctl.destinations.postgresql:PostgresTable",
        "set PGPASSWORD, or write it into ~/.pgpass or into a service file",
        user_is_allowed=True,
    ),
    DatabaseKind(
        "Qdrant",
        "qdrant+http://HOST[:PORT]/COLLECTION",
        ("qdrant+http", "qdrant+https"),
        "qdrant",
        ("qdrant_client",),
        "embedctl.destinations.qdrant:QdrantCollection",
        "set QDRANT_API_KEY",
    ),
    DatabaseKind(
        "Qdrant, embedded",
        "qdrant:///FOLDER?collection=COLLECTION",
        ("qdrant",),
        "qdrant",
        ("qdrant_client",),
        "embedctl.destinations.qdrant:QdrantCollection",
        "omit it: a folder has none",
    ),
    DatabaseKind(
        "LanceDB",
        "lancedb:///FOLDER?table=TABLE",
        ("lancedb",),
        "lancedb",
        ("lancedb",),
        "embedctl.destinations.lancedb:LanceTable",
        "omit it: a folder has none",
    ),
)


def kinds() -> Iterator[DatabaseKind]:
    """All kinds of databases, those of plug-ins last. Nothing of a plug-in is loaded."""
    yield from BUILT_IN
    for entry in entry_points(group=GROUP):  # it reads the metadata of every distribution
        made_by = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        yield DatabaseKind(
            entry.name, f"{entry.name}:…", (entry.name.lower(),), "", (), entry.value, plugin=made_by or "a plug-in"
        )


def destination_of(text: str, settings: Settings) -> Destination:
    """The database of a URL. Its client is imported, and nothing is opened. SettingsError: no database has such a URL,
    it is incomplete, or it holds a password."""
    kind = _kind_of(text)
    if kind is None:
        known = ", ".join(sorted(name for each in kinds() for name in each.schemes))
        # Its scheme alone: the rest may hold a password.
        begin = text.partition(":")[0].lower() if ":" in text else "that"
        raise SettingsError(
            f"-o: no database has a URL that begins with {begin!r}. Known: {known}. `embedctl destinations` shows "
            "their forms"
        )
    url = parse_url(text, password_fix=kind.password_fix, user_is_allowed=kind.user_is_allowed)
    return _maker(kind)(url, settings)


def is_database(text: str) -> bool:
    """Whether a text is the URL of a database, known or not."""
    return ("://" in text and not text.lower().startswith("s3:")) or _kind_of(text) is not None


def _kind_of(url: str) -> DatabaseKind | None:
    scheme, colon, _ = url.lower().partition(":")
    # Ours come first, so that a plug-in never takes over a scheme of ours, and the passwords with it.
    return next((kind for kind in kinds() if scheme in kind.schemes), None) if colon else None


def _maker(kind: DatabaseKind) -> Callable[[DestinationUrl, Settings], Destination]:
    make: Callable[[DestinationUrl, Settings], Destination] = EntryPoint(kind.name, kind.maker, GROUP).load()
    if not callable(make):
        raise SettingsError(f"the entry point {kind.name!r} of {kind.plugin} makes no destination: it is not callable")
    return make

"""The databases that vectors can be delivered to, and how each is found by a URL."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from embedctl.destinations.interface import Destination
from embedctl.destinations.urls import parse_url
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings


@dataclass(frozen=True, slots=True)
class DatabaseKind:
    """A kind of database.

    Attributes:
        form: of its URL, for people.
        extra: the extra of embedctl that installs its client.
        needs: the modules of that client.
        maker: what makes the destination, as `module:name`.
        password_fix: where its password belongs, as the end of a sentence.
        user_is_allowed: whether its URL may name a user.
    """

    name: str
    form: str
    schemes: tuple[str, ...]
    extra: str
    needs: tuple[str, ...]
    maker: str
    password_fix: str
    user_is_allowed: bool = False

    @property
    def installed(self) -> bool:
        return all(find_spec(module) is not None for module in self.needs)

    @property
    def install(self) -> str:
        return f"pip install 'embedctl[{self.extra}]'"


KINDS = (
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


def destination_of(text: str, settings: Settings) -> Destination:
    """The database of a URL. Its client is imported, and nothing is opened. SettingsError: no database has such a URL,
    it is incomplete, or it holds a password."""
    kind = _kind_of(text)
    if kind is None:
        known = ", ".join(sorted(name for each in KINDS for name in each.schemes))
        # Its scheme alone: the rest may hold a password.
        begin = text.partition(":")[0].lower() if ":" in text else "that"
        raise SettingsError(
            f"-o: no database has a URL that begins with {begin!r}. Known: {known}. `embedctl destinations` shows "
            "their forms"
        )
    url = parse_url(text, password_fix=kind.password_fix, user_is_allowed=kind.user_is_allowed)
    module, _, name = kind.maker.partition(":")
    made: Destination = getattr(import_module(module), name)(url, settings)
    return made


def is_database(text: str) -> bool:
    """Whether a text is the URL of a database, known or not."""
    return ("://" in text and not text.lower().startswith("s3:")) or _kind_of(text) is not None


def _kind_of(url: str) -> DatabaseKind | None:
    scheme, colon, _ = url.lower().partition(":")
    return next((kind for kind in KINDS if scheme in kind.schemes), None) if colon else None

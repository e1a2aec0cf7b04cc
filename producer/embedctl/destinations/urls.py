"""The URL of a database. It never holds a password."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from embedctl_config.errors import SettingsError

#: Options that would hold a secret. What users pass as a flag is in the shell's history and in the list of processes.
_SECRETS = frozenset(("password", "passwd", "pwd", "sslpassword", "api_key", "api-key", "apikey", "key", "token"))


@dataclass(frozen=True, slots=True)
class DestinationUrl:
    """A database's URL in parts, decoded; `address`, which is host and port, and `path` are as they stand in the URL.
    What it does not name is empty."""

    text: str
    scheme: str
    address: str
    path: str
    query: Mapping[str, str]

    def __str__(self) -> str:
        return self.text

    def only(self, *names: str) -> None:
        """Raise SettingsError for an option with another name."""
        for name in self.query:
            if name not in names:
                raise SettingsError(f"{self}: there is no option {name!r}. Known: {', '.join(names)}")

    def needed(self, name: str) -> str:
        """The value of an option; SettingsError if it is missing or empty."""
        if not self.query.get(name):
            raise SettingsError(f"{self}: add the {name}, as ?{name}=NAME, and put the URL in quotes")
        return self.query[name]

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        """The value of an option, by default the first of the choices; SettingsError if it is none of them."""
        value = self.query.get(name, choices[0])
        if value not in choices:
            raise SettingsError(f"{self}: {name} is one of {', '.join(choices)}, not {value!r}")
        return value


def parse_url(text: str, *, password_fix: str, user_is_allowed: bool = False) -> DestinationUrl:
    """Read a database's URL. SettingsError: it can't be read, or it holds a password, which belongs where
    `password_fix` says; the message does not show the URL then."""
    try:
        parts = urlsplit(text)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise SettingsError("-o can't be read as a URL; `embedctl destinations` shows the forms") from None
    before, at, address = parts.netloc.rpartition("@")
    if ":" in before or (at and not user_is_allowed) or any(name.lower() in _SECRETS for name, _ in query):
        raise SettingsError(
            f"the URL of -o holds a password or a key, which others can read in the list of processes: leave it out, "
            f"and {password_fix}"
        )
    if parts.fragment:
        raise SettingsError("the URL of -o holds a '#': write it as %23")
    names = [name for name, _ in query]
    if len(set(names)) < len(names):
        raise SettingsError("the URL of -o has an option twice: leave one of them out")
    return DestinationUrl(text, parts.scheme.lower(), address, parts.path, dict(query))

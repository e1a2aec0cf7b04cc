"""What PostgreSQL's errors mean: some pass, some are about a record, and the others about all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from embedctl_config.errors import DestinationRefused, DestinationUnavailable, OutputError

#: Classes of errors that may pass: of the connection, of other transactions, of room, and of a server that is told to
#: stop, or has become a standby, which only reads.
_PASSING = ("08", "25", "28", "40", "53", "55", "57", "58")
#: Classes of errors that are about all records: what is missing or denied, and what PostgreSQL does not do at all. What
#: is left is about what is written, whatever a constraint says and a trigger raises, with any code.
_OF_ALL = ("0A", "42")
#: What raises that a row violates a policy, in PostgreSQL's source: its code is that of a permission denied.
_OF_POLICIES = "ExecWithCheckOptions"


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Raises what :class:`Destination` promises for errors of psycopg, which name a table."""
    try:
        yield
    except psycopg.Error as error:
        kind = (error.sqlstate or "")[:2]
        # Without a state, it is the client that refuses a value, such as a text with a NUL, or has no connection.
        may_pass = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        of_data = isinstance(error, psycopg.DataError)
        if kind:
            may_pass = kind in _PASSING
            of_data = kind not in _OF_ALL or error.diag.source_function == _OF_POLICIES
        if may_pass:
            raise DestinationUnavailable(f"{name}: {reason(error)}") from error
        if of_data:
            raise DestinationRefused(f"{name} refuses it: {reason(error)}") from error
        raise OutputError(f"{name}: {reason(error)}") from error


def reason(error: psycopg.Error) -> str:
    """What PostgreSQL says, on one line; its DETAIL would repeat a record's content."""
    said = error.diag.message_primary or str(error)
    return " ".join(said.split()) or type(error).__name__

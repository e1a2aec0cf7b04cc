"""How long a hub is asked again after it failed to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

#: Answers after which the same question may have another one.
_PASSING = (408, 429, 500, 502, 503, 504)
#: The first pause, which doubles, and the longest one that a hub may ask for (seconds).
_FIRST_S, _LONGEST_S = 1.0, 300.0


class Retry(Exception):
    """Raised when patience is at its end; its cause is the last failure, and it says in words what that was."""


class Patience:
    """Pauses after failures, longer and longer.

    Args:
        say: is told of every pause.
        host: the hub's, for messages.
        tries: how often it is asked in all, until :meth:`renew`.
    """

    def __init__(self, say: Callable[[str], None], host: str, *, tries: int) -> None:
        self._say, self._host, self._tries = say, host, tries
        self._failed = 0

    def renew(self) -> None:
        """Some progress was made, so count from zero again."""
        self._failed = 0

    def after_status(self, status: int, headers: Mapping[str, str], error: Exception) -> None:
        """Pause after an answer that may be another one later.

        Raises:
            Retry: it was the last try, or the hub asks for too long a pause.
            Exception: `error`, which will be the same each time.
        """
        if status not in _PASSING:
            raise error
        asked = _seconds(headers.get("Retry-After", ""))
        said = f"{self._host} answers {status}" + (f" and asks for a pause of {asked:g} s" if asked else "")
        if asked > _LONGEST_S:
            raise Retry(said) from error
        self._pause(said, asked, error)

    def after_break(self, error: Exception) -> None:
        """Pause after a connection that broke or did not come about.

        Raises:
            Retry: it was the last try.
        """
        # The message of such an error may hold a signed address.
        self._pause(f"the connection to {self._host} failed ({type(error).__name__})", 0.0, error)

    def _pause(self, said: str, asked_s: float, error: Exception) -> None:
        self._failed += 1
        if self._failed >= self._tries:
            raise Retry(said) from error
        pause_s = asked_s or _FIRST_S * 2 ** (self._failed - 1)
        self._say(f"{said}: going on in {pause_s:g} s")
        time.sleep(pause_s)


def _seconds(retry_after: str) -> float:
    """The pause of a Retry-After header; 0 if it is a date or missing: the usual pause is taken."""
    return float(retry_after) if retry_after.strip().isdecimal() else 0.0

"""Notices to a user who waits: at once, and again every minute while they stay true."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A notice that stays true is repeated after this (seconds).
AGAIN_AFTER_S = 60.0


class Reminder:
    """Says a sentence at once, and again every minute while it is repeated."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._last = ""
        self._again_at = 0.0

    def __call__(self, sentence: str) -> None:
        """Say this sentence if it is new or due again; an empty one means that there is nothing to say now."""
        now = time.monotonic()
        if sentence and (sentence != self._last or now >= self._again_at):
            self._again_at = now + AGAIN_AFTER_S
            self._say(sentence)
        self._last = sentence

    def over(self) -> bool:
        """There is nothing to say now; returns whether there was."""
        was, self._last = self._last, ""
        return bool(was)

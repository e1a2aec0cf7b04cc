"""What people who wait are told: at once, and again every minute while it stays true."""

from __future__ import annotations

import time
from collections.abc import Callable

#: What stays true is said again after this (seconds).
AGAIN_AFTER_S = 60.0


class Reminder:
    """Says a sentence once, and again every minute for as long as it is the one to say.

    Args:
        say: takes the sentence.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._last = ""
        self._again_at = 0.0

    def __call__(self, sentence: str) -> None:
        """Say this where it is due; an empty sentence says that there is nothing to say at present."""
        now = time.monotonic()
        if sentence and (sentence != self._last or now >= self._again_at):
            self._again_at = now + AGAIN_AFTER_S
            self._say(sentence)
        self._last = sentence

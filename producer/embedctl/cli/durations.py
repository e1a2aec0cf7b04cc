"""Durations on the command line, such as `30m`."""

from __future__ import annotations

import re
from datetime import timedelta

import click

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DURATION = re.compile(rf"([0-9]{{1,5}})([{''.join(_UNITS)}])")


def duration(text: str) -> timedelta:
    """A whole number and its unit; click.BadParameter for something else."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a number and a unit, such as 30m, 12h or 7d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})

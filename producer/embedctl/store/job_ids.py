"""The list of all jobs: walking it, and finding an id in it by its beginning or its ending."""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from itertools import chain, compress

from embedctl.store.connection import Connection
from embedctl_config import keys
from embedctl_config.errors import JobAmbiguous

#: The fewest characters to which an id may be shortened.
SHORTEST = 4
#: Ids that are read at once.
SLICE = 1000
#: Ids that Redis compares at once with an ending: about 1 ms. With more at once, each costs more.
_COMPARED = 1000
#: Most candidates that an error names.
_NAMED = 5
#: When a job was made (ms since 1970) and its id: the order of the list of all jobs.
Place = tuple[int, str]
#: Comes after every id.
_BEHIND_ALL = "~"
#: Completes what is shortened.
_ANY_ID = "00000000-000000-0000000000"
#: What completes the beginning of an id to the last and to the first time that begins so.
_BOUNDS = ("99999999-999999", "00000000-000000")


def is_beginning(text: str) -> bool:
    """Whether an id may begin so."""
    return keys.is_job_id(text + _ANY_ID[len(text) :])


def is_ending(text: str) -> bool:
    """Whether an id may end so."""
    return keys.is_job_id(_ANY_ID[: max(0, len(_ANY_ID) - len(text))] + text)


def newest_first(connection: Connection, beginning: str = "", size: int = SLICE) -> Iterator[list[str]]:
    """The ids of all jobs, or of those made in the time with which their ids begin; the newest first, in slices.

    Jobs may be made and freed meanwhile, and none is left out or comes twice.
    """
    place: Place | None = None
    while True:
        ids, place = older(connection, place, beginning, size)
        if ids:
            yield ids
        if place is None:
            return


def older(
    connection: Connection, place: Place | None, beginning: str = "", size: int = SLICE
) -> tuple[list[str], Place | None]:
    """The next slice of :func:`newest_first` behind this place, or the first one, and the place of its last id; None if
    there are no more."""
    newest_ms, oldest_ms = _made_between(beginning)
    newest_ms, last = place or (newest_ms, _BEHIND_ALL)
    skip = 0
    while True:
        with connection.client() as client:
            found = client.zrange(
                keys.JOBS, newest_ms, oldest_ms, desc=True, byscore=True, offset=skip, num=size, withscores=True
            )
        made = [(int(made_ms), job_id.decode()) for job_id, made_ms in found]
        fresh = [job_id for made_ms, job_id in made if (made_ms, job_id) < (newest_ms, last)]
        more = len(found) == size
        if fresh or not more:
            return [job_id for job_id in fresh if keys.is_job_id(job_id)], made[-1] if more else None
        skip += size  # a whole slice of one millisecond


def find(connection: Connection, shortened: str) -> list[str]:
    """The jobs whose ids begin or end so: none, one, or the first ones found if there are several.

    If the only ids are those of jobs that are gone, the newest of them.
    """
    if len(shortened) < SHORTEST:
        return []
    by_beginning = newest_first(connection, shortened) if is_beginning(shortened) else ()
    by_ending = _ending_so(connection, shortened) if is_ending(shortened) else ()
    found: dict[str, None] = {}
    gone: list[str] = []
    for ids in chain(by_beginning, by_ending):
        fitting = [job_id for job_id in ids if fits(job_id, shortened)]
        exist = connection.ask_each(fitting, lambda pipe, job_id: pipe.exists(keys.job(job_id)))
        found |= dict.fromkeys(compress(fitting, exist))
        gone += fitting
        if len(found) > 1:
            return list(found)
        del gone[1:]
    return list(found) or gone


def fits(job_id: str, shortened: str) -> bool:
    """Whether an id begins or ends so."""
    return job_id.startswith(shortened) or job_id.endswith(shortened)


def _ending_so(connection: Connection, ending: str) -> Iterator[list[str]]:
    """The ids that end so, the newest first. Redis compares them, in slices, and sends only those that fit."""
    with connection.client() as client:
        found: dict[bytes, float] = dict(client.zscan_iter(keys.JOBS, match=f"*{ending}", count=_COMPARED))
    ids = [job_id.decode() for job_id in sorted(found, key=lambda job_id: -found[job_id])]
    yield [job_id for job_id in ids if keys.is_job_id(job_id)]


def ambiguous(shortened: str, found: list[str]) -> JobAmbiguous:
    """The error for a shortened id that fits several jobs."""
    named = found[:_NAMED]
    more = ["and more: `embedctl list`"] if len(found) > len(named) else []
    advice = f"several jobs begin or end with {shortened!r}: type more of the id, or its last part:"
    return JobAmbiguous("\n".join([advice, *named, *more]))


def _made_between(beginning: str) -> tuple[int, int]:
    """The last and the first moment in ms since 1970 when a job was made whose id begins so."""
    last, first = (_moment_s(beginning + digits[len(beginning) :]) for digits in _BOUNDS)
    return last * 1000 + 999, first * 1000


def _moment_s(job_id: str) -> int:
    """The time with which an id begins; the nearest that exists, if there is no such month, day or hour."""
    year, month = max(1, int(job_id[:4])), min(12, max(1, int(job_id[4:6])))
    day = min(calendar.monthrange(year, month)[1], max(1, int(job_id[6:8])))
    hour, minute, second = (min(most, int(job_id[at : at + 2])) for at, most in ((9, 23), (11, 59), (13, 59)))
    return calendar.timegm((year, month, day, hour, minute, second))

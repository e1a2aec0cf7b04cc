"""The list of all jobs: walking it, and finding an id in it by its beginning or its ending."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import compress, islice
from operator import itemgetter

from embedctl.store.connection import Connection
from embedctl_config import keys
from embedctl_config.errors import JobAmbiguous

#: The fewest characters to which an id may be shortened.
SHORTEST = 4
#: Ids that are read at once.
SLICE = 1000
#: Ids that Redis compares at once with a shortened one: about 1 ms. With more at once, each costs more.
_COMPARED = 1000
#: Most candidates that an error names.
_NAMED = 5
#: When a job was made (ms since 1970) and its id: the order of the list of all jobs.
Place = tuple[int, str]
#: Come after every job.
_LATEST_MS, _BEHIND_ALL = 2**53, "~"
_OF_IDS = re.compile("[0-9a-f-]+")


def newest_first(connection: Connection, size: int = SLICE) -> Iterator[list[str]]:
    """The ids of all jobs, the newest first, in slices.

    Jobs may be made and freed meanwhile, and none is left out or comes twice.
    """
    place: Place | None = None
    while True:
        ids, place = older(connection, place, size)
        if ids:
            yield ids
        if place is None:
            return


def older(connection: Connection, place: Place | None, size: int = SLICE) -> tuple[list[str], Place | None]:
    """The next slice of :func:`newest_first` behind this place, or the first one, and the place of its last id; None if
    there are no more."""
    newest_ms, last = place or (_LATEST_MS, _BEHIND_ALL)
    skip = 0
    while True:
        with connection.client() as client:
            found = client.zrange(
                keys.JOBS, newest_ms, 0, desc=True, byscore=True, offset=skip, num=size, withscores=True
            )
        made = [(int(made_ms), job_id.decode()) for job_id, made_ms in found]
        fresh = [job_id for made_ms, job_id in made if (made_ms, job_id) < (newest_ms, last)]
        more = len(found) == size
        if fresh or not more:
            return [job_id for job_id in fresh if keys.is_job_id(job_id)], made[-1] if more else None
        skip += size  # a whole slice of one millisecond


def find(connection: Connection, shortened: str) -> list[str]:
    """The jobs whose ids begin or end so: none, one, or the first ones found if there are several.

    If the only ids are those of jobs that are gone, the newest of them. Redis compares the ids, in slices, and sends
    only those that fit.
    """
    if len(shortened) < SHORTEST or _OF_IDS.fullmatch(shortened) is None:
        return []
    found: dict[str, None] = {}  # a scan may give an id twice
    gone: list[tuple[float, str]] = []
    with connection.client() as client:
        made = client.zscan_iter(keys.JOBS, match=f"*{shortened}*", count=_COMPARED)
        while len(found) < 2 and (some := list(islice(made, SLICE))):
            newest = [(made_ms, job_id.decode()) for job_id, made_ms in sorted(some, key=itemgetter(1), reverse=True)]
            fitting = [each for each in newest if keys.is_job_id(each[1]) and fits(each[1], shortened)]
            ids = [job_id for _, job_id in fitting]
            exist = connection.ask_each(ids, lambda pipe, job_id: pipe.exists(keys.job(job_id)))
            found |= dict.fromkeys(compress(ids, exist))
            gone = sorted([*gone, *fitting], reverse=True)[:1]
    return list(found) or [job_id for _, job_id in gone]


def fits(job_id: str, shortened: str) -> bool:
    """Whether an id begins or ends so."""
    return job_id.startswith(shortened) or job_id.endswith(shortened)


def ambiguous(shortened: str, found: list[str]) -> JobAmbiguous:
    """The error for a shortened id that fits several jobs."""
    named = found[:_NAMED]
    more = ["and more: `embedctl list`"] if len(found) > len(named) else []
    advice = f"several jobs begin or end with {shortened!r}: type more of the id, or its last part:"
    return JobAmbiguous("\n".join([advice, *named, *more]))

"""A plan holds for the corpus that was compared, and names its difference."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from embedctl.changes.cache import Hits
from embedctl.changes.plan import ENCODE, FIRST_HIT, Plan, compare
from embedctl.digests import Digests
from embedctl.records import Record, make_record
from embedctl_config.errors import InputError

KNOWN = 10


def records(*texts: object) -> list[Record]:
    return [make_record(text, f"id-{at}", 100, b'{"n":1}') for at, text in enumerate(texts)]


def texts(count: int = 20) -> list[str]:
    return [f"text {at}" for at in range(count)]


def known(digests: Digests) -> npt.NDArray[np.int64]:
    """A cache that has the texts below number 10."""
    wanted = {make.tobytes(): at for at, make in enumerate(_digests())}
    return np.array([wanted.get(row.tobytes(), -1) for row in digests], np.int64)


def _digests() -> Iterator[npt.NDArray[np.uint8]]:
    return (np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8) for text in texts(KNOWN))


def plan_of(corpus: list[Record]) -> Plan:
    return compare(corpus, None, known, Hits(), copies=False)


def test_the_records_to_encode_are_those_that_nothing_has() -> None:
    corpus = records(*reversed(texts()), None)
    plan = plan_of(corpus)
    assert plan.sources.tolist() == [*[ENCODE] * 10, *(FIRST_HIT - at for at in reversed(range(10))), ENCODE]
    assert (plan.unchanged, plan.cached, plan.to_encode) == (0, 10, 11)
    assert list(plan.difference(corpus)) == [*corpus[:10], corpus[20]]


@pytest.mark.parametrize(
    ("now", "at"),
    [
        ([*texts()[:15], "changed", *texts()[16:]], 15),
        (texts()[:18], 20),  # all that were compared
        ([*texts(), "one more"], 20),
        (["text 0", "text 0", *texts()[1:10], *texts()[10:]], 10),
    ],
)
def test_a_corpus_that_has_changed_is_noticed(now: list[str], at: int) -> None:
    plan = plan_of(records(*texts()))
    with pytest.raises(InputError, match=f"at record {at}"):
        list(plan.difference(records(*now)))


def test_a_changed_id_or_kept_field_is_noticed_too() -> None:
    plan = plan_of(records(*texts()))
    for change in ({"id": "other"}, {"kept": b'{"n":2}'}):
        corpus = records(*texts())
        corpus[12] = corpus[12]._replace(**change)
        with pytest.raises(InputError, match="at record 12"):
            list(plan.difference(corpus))


def test_the_key_is_that_of_the_difference_alone() -> None:
    plan = plan_of(records(*texts()))
    key = plan.key("model")
    assert plan_of(records(*texts())).key("model") == key
    other = records(*texts())
    other[3] = other[3]._replace(kept=b'{"n":2}')
    assert plan_of(other).key("model") == key, "it is not encoded"
    other[13] = other[13]._replace(kept=b'{"n":2}')
    assert plan_of(other).key("model") != key
    assert plan.key("another model") != key
    assert plan_of(records(*texts(19))).key("model") != key

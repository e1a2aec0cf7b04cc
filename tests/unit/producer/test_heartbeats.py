"""Heartbeats as texts: what was written is read, by every version, and what is no heartbeat is refused."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedctl.store import ServedModel, WorkerRow, heartbeats
from embedctl.store.heartbeats import parse, written

_NUMBERS = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
_VALUES = st.none() | st.booleans() | _NUMBERS | st.text(max_size=5)
_MODELS = st.builds(ServedModel, *[_VALUES] * len(fields(ServedModel)))
_PLAIN_FACTS = {each.name: _VALUES for each in fields(WorkerRow) if each.name not in ("models", "holding")}
_WORKERS = st.builds(
    WorkerRow,
    models=st.dictionaries(st.text(max_size=5), _MODELS, max_size=3),
    holding=st.lists(st.tuples(st.text(max_size=5), _NUMBERS), max_size=3).map(tuple),
    **_PLAIN_FACTS,
)
_OPTIONAL = [each.name for each in fields(WorkerRow) if each.default is not MISSING]
PLAIN = WorkerRow("i", "n", 1, "h", "cpu", "b", "fp32", "0", 1, {"m": ServedModel("f", 3, 1.5)}, (("job", 2),))


def in_full(beat: str) -> WorkerRow:
    """The worker of a heartbeat, as the json module and the names of the facts give it."""
    return heartbeats._of_any_version(json.loads(beat))


@settings(max_examples=40, deadline=None)
@given(_WORKERS)
def test_what_is_written_is_read_as_before(worker: WorkerRow) -> None:
    beat = written(worker)
    assert parse(beat.encode()) == in_full(beat) == worker


@given(_WORKERS, st.sets(st.sampled_from(_OPTIONAL)), st.dictionaries(st.text(max_size=5).map("new ".__add__), _VALUES))
def test_an_older_worker_says_less_and_a_newer_one_more(
    worker: WorkerRow, less: set[str], more: dict[str, Any]
) -> None:
    facts = {name: value for name, value in asdict(worker).items() if name not in less - {"holding"}}
    beat = json.dumps(facts | more)
    assert parse(beat.encode()) == in_full(beat)


@pytest.mark.parametrize("rate", [math.inf, math.nan, 1e300, 2**70])
def test_a_number_that_the_fast_parser_refuses_is_read(rate: float) -> None:
    facts = json.loads(written(PLAIN))
    facts["models"]["m"]["tokens_per_s"] = rate
    (served,) = parse(json.dumps(facts).encode()).models.values()
    assert served.tokens_per_s == rate or math.isnan(rate)


def test_a_lone_surrogate_is_read() -> None:
    facts = json.loads(written(PLAIN)) | {"host": "h\udcff"}
    assert parse(json.dumps(facts).encode()).host == "h\udcff"


@pytest.mark.parametrize(
    "beat",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'"text"',
        b"\xff",
        written(PLAIN).replace('"instance": "i", ', "").encode(),
        json.dumps(json.loads(written(PLAIN)) | {"models": ["m"]}).encode(),
        json.dumps(json.loads(written(PLAIN)) | {"models": {"m": "f"}}).encode(),
        json.dumps(json.loads(written(PLAIN)) | {"models": {"m": {"dim": 3}}}).encode(),
        json.dumps(json.loads(written(PLAIN)) | {"holding": [["job", 2, 3]]}).encode(),
        json.dumps(json.loads(written(PLAIN)) | {"holding": 7}).encode(),
    ],
)
def test_what_is_no_heartbeat_is_refused_with_the_same_error(beat: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)) as expected:
        heartbeats._of_any_version(json.loads(beat.decode()))
    with pytest.raises(type(expected.value)) as found:
        parse(beat)
    assert str(found.value) == str(expected.value)

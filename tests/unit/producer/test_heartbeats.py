"""Heartbeats as texts: what was written is read, and what is no heartbeat is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedctl.store import ServedModel, WorkerRow
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
PLAIN = WorkerRow("i", "n", 1, "h", "cpu", "b", "fp32", "0", 1, {"m": ServedModel("f", 3, 1.5)}, (("job", 2),))


@settings(max_examples=40, deadline=None)
@given(_WORKERS)
def test_what_is_written_is_read_as_before(worker: WorkerRow) -> None:
    assert parse(written(worker).encode()) == worker


@pytest.mark.parametrize("rate", [math.inf, 1e300, 2**70])
def test_what_the_fast_parser_refuses_is_read(rate: float) -> None:
    facts = json.loads(written(PLAIN)) | {"host": "h\udcff"}
    facts["models"]["m"]["tokens_per_s"] = rate
    found = parse(json.dumps(facts).encode())
    assert (found.models["m"].tokens_per_s, found.host) == (rate, "h\udcff")


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
def test_what_is_no_heartbeat_is_refused(beat: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)):
        parse(beat)

"""Digests of texts travel with their records, and leave nothing behind among the kept fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import pytest

from embedctl import SettingsError
from embedctl.corpus.digests import DIGEST_BYTES, digest_of, taken_out, with_digests
from embedctl.corpus.kept import DIGEST_FIELD, check_keep
from embedctl.corpus.records import make_record
from embedctl.destinations.interface import Contract
from embedctl.waiting.results import chunk_vectors
from embedctl_config.errors import OutputError, WireForeign
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.wire import ChunkResult

OPTIONS = {"prompt": None, "long": "cut", "normalize": True}
MODEL = "ab" * 32


def result(kept: Sequence[bytes] | None) -> ChunkResult:
    """The result of two records."""
    return ChunkResult(
        0, 2, 3, bytes(16), MODEL, "fp32", "dummy", np.zeros((2, 3), np.float32).tobytes(), [1, 2], kept=kept
    )


@pytest.mark.parametrize("kept", [None, b"{}", b'{"title":"a"}'])
def test_a_digest_is_that_of_the_texts_bytes(kept: bytes | None) -> None:
    (record,) = with_digests([make_record("tëxt", "1", 100, kept)])
    assert record.kept is not None
    fields = json.loads(record.kept)
    digest = fields.pop(DIGEST_FIELD)
    assert bytes.fromhex(digest) == hashlib.sha256("tëxt".encode()).digest()
    assert fields == json.loads(kept or b"{}")
    assert (record.text, record.id) == ("tëxt".encode(), "1")


@pytest.mark.parametrize("text", [None, 7, "a" * 101, b"\xff"])
def test_a_record_without_a_text_has_no_digest(text: object) -> None:
    """What stands in place of its text must not be taken for a text."""
    assert digest_of(make_record(text, None, 100)) == bytes(DIGEST_BYTES)


def test_results_tell_digests_beside_the_kept_fields() -> None:
    records = list(with_digests([make_record(text, None, 100, b'{"n":1}') for text in ("a", "b")]))
    chunk = chunk_vectors(result([record.kept or b"" for record in records]))
    assert chunk.kept == [{"n": 1}, {"n": 1}]
    assert chunk.digests is not None
    assert [row.tobytes() for row in chunk.digests] == [hashlib.sha256(text).digest() for text in (b"a", b"b")]


@pytest.mark.parametrize("digest", ["zz", "ab", 7, "ab" * 33])
def test_a_digest_that_is_none_is_refused(digest: object) -> None:
    with pytest.raises(WireForeign, match="digest"):
        taken_out([{DIGEST_FIELD: digest}])


def test_users_can_not_keep_a_field_of_that_name() -> None:
    with pytest.raises(SettingsError, match="own name"):
        check_keep([DIGEST_FIELD])


def test_what_an_output_says_of_itself_is_checked() -> None:
    about = Contract(job_fingerprint(MODEL, OPTIONS), "model", "fp32", OPTIONS, model_fingerprint=MODEL)
    assert Contract.in_file(about.text, "here") == about
    for damaged in ("", "{}", "[]", about.text.replace(MODEL, "cd" * 32), about.text.replace('"cut"', '"mean"')):
        with pytest.raises(OutputError, match="here"):
            Contract.in_file(damaged, "here")

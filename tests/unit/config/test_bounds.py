"""What is too long, too large or leads elsewhere is refused by name; so are wrong limits of tenants."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import pytest

from embedctl.corpus.records import check_id
from embedctl.corpus.rows import Rows, records_of
from embedctl_config import wire
from embedctl_config.errors import InputError, ModelError, SettingsError, WireForeign, WireTruncated
from embedctl_config.loading import load_settings
from embedctl_config.record_ids import MAX_ID_BYTES
from embedctl_config.settings import MAX_CHUNK_BYTES, MAX_CHUNK_RECORDS, Settings
from embedctl_config.tenants import LIMITS, RATES, TenantEntry
from embedctl_config.wire import ChunkInput
from embedctl_workers.models.files import fingerprint_of


def test_an_id_as_long_as_allowed_is_taken_and_a_longer_one_is_named() -> None:
    assert check_id("é" * (MAX_ID_BYTES // 2), "record 0") == "é" * (MAX_ID_BYTES // 2)
    for label in ("é" * (MAX_ID_BYTES // 2) + "x", "x" * (MAX_ID_BYTES + 1), b"x" * (MAX_ID_BYTES + 1)):
        with pytest.raises(
            InputError, match=r"corpus.jsonl, line 7: the id is longer than 1,024 bytes\. Name.*--id-field"
        ):
            check_id(label, "corpus.jsonl, line 7")
    for number in (2**63, -(2**63) - 1, 10**100_000):
        with pytest.raises(InputError, match="record 0: the id is a whole number beyond 64 bits with a sign: write"):
            check_id(number, "record 0")
    assert check_id(-(2**63), "record 0") == -(2**63)
    with pytest.raises(InputError, match="record 1: the id is longer"):
        list(records_of(["a", "b"], Rows(10), ["x", "x" * 2000]))


def test_settings_are_bounded() -> None:
    for name, most in (
        ("chunk_size", MAX_CHUNK_RECORDS),
        ("chunk_bytes", MAX_CHUNK_BYTES),
        ("max_text_bytes", MAX_CHUNK_BYTES),
    ):
        assert getattr(load_settings({"HOME": "/", f"EMBEDCTL_{name.upper()}": str(most)}), name) == most
        with pytest.raises(SettingsError, match=rf"{name}: {most + 1} is above its maximum of {most} "):
            load_settings({"HOME": "/", f"EMBEDCTL_{name.upper()}": str(most + 1)})


@pytest.mark.parametrize("rows", [3, 1000, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", ["input", "result"])
def test_a_chunk_that_claims_more_than_it_holds_is_refused_before_memory_is_asked_for(kind: str, rows: int) -> None:
    honest = wire.encode_input(ChunkInput(0, bytes(2), [b"one", b"two"]))
    if kind == "result":
        honest = wire.encode_result(
            wire.ChunkResult(0, 2, 2**20, wire.digest_of(honest), "00" * 32, "fp32", "dummy", bytes(2 * 2**22), [1, 2])
        )
    data = bytearray(honest)
    struct.pack_into("<I", data, wire.ROWS_AT, rows)
    tracemalloc.start()
    try:
        # More rows than any chunk may have are refused for that.
        with pytest.raises((WireTruncated, WireForeign)):
            (wire.decode_input if kind == "input" else wire.decode_result)(bytes(data))
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", ["../other", "1_Pooling/../../other", "/etc", ".."])
def test_a_model_that_names_files_outside_of_its_folder_is_refused(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (tmp_path / "other").mkdir()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    kind = {"type": "sentence_transformers.models.Transformer"}
    (folder / "modules.json").write_text(json.dumps([{"path": "", **kind}, {"path": path, **kind}]))
    with pytest.raises(ModelError, match="names a folder outside of the model's own"):
        fingerprint_of(folder)
    (folder / "modules.json").write_text(json.dumps([{"path": "", **kind}, {"path": "1_Pooling", **kind}]))
    assert fingerprint_of(folder)


def loaded(folder: Path, text: str) -> Settings:
    (folder / "embedctl.toml").write_text(text)
    return load_settings({}, directory=folder)


def test_limits_are_read_and_any_may_be_left_out(tmp_path: Path) -> None:
    text = "[tenants.default]\nmax_jobs = 5\n[tenants.'team/a']\nweight = 2\nmax_waiting_bytes = 1_000"
    settings = loaded(tmp_path, text)
    assert settings.tenants["default"].limits == {**dict.fromkeys((*LIMITS, *RATES), 0), "max_jobs": 5}
    assert settings.tenants["team/a"] == TenantEntry(weight=2.0, max_waiting_bytes=1000)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("max_jobs = -1", r"^tenants\.a\.max_jobs: -1 is not between 0 \(no limit\) and 2\*\*53$"),
        ("max_waiting_bytes = 9007199254740993", r"tenants\.a\.max_waiting_bytes: 9007199254740993 is not between 0"),
        ("max_jobs = 2.5", r"tenants\.a\.max_jobs: 2\.5 is not of the right type"),
        ("max_jobs = true", r"tenants\.a\.max_jobs: True is not of the right type"),
        ("max_waiting_record = 1", r"max_waiting_record: no such key\. Did you mean 'max_waiting_records'\?"),
    ],
)
def test_a_wrong_limit_is_named(line: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=says):
        loaded(tmp_path, f"[tenants.a]\n{line}\n")

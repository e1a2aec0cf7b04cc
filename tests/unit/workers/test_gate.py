"""Figures, bounds and the cache of references; no model takes part."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from embedctl_config.errors import GateFailed, MissingExtra, ModelError
from embedctl_config.hardware import THRESHOLDS, HardwareClass, Thresholds
from embedctl_config.outputs import PLAIN, Output
from embedctl_workers.accuracy.gate import measure_backend, run_gate
from embedctl_workers.accuracy.ranking import BEST, PASSAGES, QUERIES, agreement, ranked
from embedctl_workers.accuracy.report import Report
from embedctl_workers.arrays.distance import measure
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.base import Reference
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models import references
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import PROMPT, TEXTS, gate_texts
from embedctl_workers.models.references import references_for, references_path

DIM = 16
FILES = ModelFiles("mine", Path("/nowhere"), "ab" * 32)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(threads=1, cache=tmp_path / "cache")


@pytest.fixture
def vectors() -> Vectors:
    return np.random.default_rng(0).normal(size=(8, DIM)).astype(np.float32)


def encode(backend: DummyBackend, prompt: str | None = None) -> Vectors:
    texts = gate_texts()
    return backend.finish(backend.forward(backend.tokenize(texts, prompt), np.arange(len(texts))), normalize=False)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The dummy backend stands in for torch; the commands that would have run."""
    commands: list[list[str]] = []

    @contextmanager
    def run(command: list[str], *, umask: int, **_: object) -> Iterator[object]:
        commands.append(command)
        backend = DummyBackend(dim=DIM)
        before = os.umask(umask)
        try:
            with Path(command[-3]).open("wb") as file:
                np.savez(file, plain=encode(backend), prompted=encode(backend, PROMPT))
        finally:
            os.umask(before)
        yield SimpleNamespace(returncode=0, communicate=lambda: (None, ""))

    monkeypatch.setattr(references, "running", run)
    return commands


class Gated(DummyBackend):
    """A dummy backend that is held to what the fixture `computed` computes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"dim": DIM, **options})
        self.reference, self.outputs = Reference(FILES), PLAIN


def test_the_texts_are_of_all_lengths_and_each_is_its_own() -> None:
    assert 16 <= len(gate_texts()) <= 32
    assert len(set(gate_texts())) == len(gate_texts())
    assert all(text.strip() for text in gate_texts())
    words = sorted(len(text.split()) for text in gate_texts())
    assert words[0] == 1
    assert words[-1] > 512
    for least in (2, 4, 8, 16, 32, 64, 128, 256):
        assert any(least <= count < 2.5 * least for count in words), least
    assert min(map(len, gate_texts())) == 1


def test_figures_are_those_of_unit_vectors_and_the_worst_text_is_named(vectors: Vectors) -> None:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    other = unit.copy()
    other[3] = -unit[3]
    found = measure(10 * other, vectors)
    assert found.worst == 3
    assert found.min_cosine == pytest.approx(-1)
    assert found.mean_cosine == pytest.approx((len(vectors) - 2) / len(vectors))
    assert found.max_abs_error == pytest.approx(2 * np.abs(unit[3]).max())


def test_agreement_counts_the_same_passages_and_discounts_their_places() -> None:
    reference = ranked(-np.arange(2 * BEST, dtype=np.float32)[np.newaxis])
    assert reference.tolist() == [list(range(BEST))]
    same, backwards = agreement(Output.SPARSE, reference, reference, 0.9), reference[:, ::-1]
    assert (same.overlap, same.passed) == (1, True)
    assert same.ndcg == pytest.approx(1)
    gains, discounts = np.arange(BEST, 0, -1), np.log2(np.arange(BEST) + 2)
    turned = agreement(Output.SPARSE, backwards, reference)
    assert turned.ndcg == pytest.approx((gains[::-1] / discounts).sum() / (gains / discounts).sum())
    assert turned.overlap == 1
    shifted = agreement(Output.SPARSE, reference + 2, reference, 0.9)
    assert (shifted.overlap, shifted.passed) == (0.8, False)
    assert agreement(Output.SPARSE, reference + BEST, reference).ndcg == 0
    assert (len(QUERIES), len(PASSAGES), len({*QUERIES, *PASSAGES})) == (30, 120, 150)


def test_a_class_is_held_to_its_own_bounds_then_to_the_artefacts_then_to_its_precisions() -> None:
    stated = Thresholds(min_cosine=0.9, mean_cosine=0.97)
    plain, own = HardwareClass(precision="int8"), HardwareClass(precision="int8", min_cosine=0.8)
    assert plain.thresholds() == THRESHOLDS["int8"]
    assert plain.thresholds(stated) == stated
    assert own.thresholds(stated) == replace(stated, min_cosine=0.8)
    assert own.thresholds() == replace(THRESHOLDS["int8"], min_cosine=0.8)
    assert (plain.overrides_in_words, own.overrides_in_words) == ("", "min_cosine 0.8")
    assert HardwareClass(max_abs_error=1e-3).thresholds().max_abs_error == 1e-3


def test_references_are_computed_once_and_kept(host: Host, computed: list[list[str]]) -> None:
    plain, prompted = references_for(FILES, host)[Output.DENSE]
    np.testing.assert_array_equal(plain, encode(DummyBackend(dim=DIM)))
    np.testing.assert_array_equal(prompted, encode(DummyBackend(dim=DIM), PROMPT))
    references_for(FILES, host)
    assert plain.dtype == np.float32
    assert plain.shape == (len(TEXTS), DIM)
    assert len(computed) == 1
    assert computed[0][-4] == str(FILES.folder)
    assert references_path(FILES, host).is_file()


@pytest.mark.parametrize("damage", [b"", b"no archive at all", None], ids=["empty", "foreign", "flipped"])
def test_damaged_references_are_computed_again(host: Host, computed: list[list[str]], damage: bytes | None) -> None:
    expected = references_for(FILES, host)[Output.DENSE]
    path = references_path(FILES, host)
    data = path.read_bytes()
    path.write_bytes(data[:900] + bytes([data[900] ^ 1]) + data[901:] if damage is None else damage)
    np.testing.assert_array_equal(references_for(FILES, host)[Output.DENSE], expected)
    assert len(computed) == 2


def test_those_who_ask_at_once_compute_once(host: Host, computed: list[list[str]]) -> None:
    threads = [threading.Thread(target=references_for, args=(FILES, host)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(computed) == 1


def test_a_failing_computation_says_why_and_leaves_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def fail(command: list[str], **_: object) -> Iterator[object]:
        Path(command[-3]).write_bytes(b"half")
        yield SimpleNamespace(returncode=1, communicate=lambda: (None, "Traceback …\nOSError: no weights\n"))

    monkeypatch.setattr(references, "running", fail)
    with pytest.raises(ModelError, match=r"references of model 'mine' can't be computed from /nowhere: .*no weights"):
        references_for(FILES, host)
    assert list(references_path(FILES, host).parent.glob("*.npz")) == []
    assert [path for path in references_path(FILES, host).parent.iterdir() if path.is_dir()] == []


def test_without_sentence_transformers_it_says_what_to_do(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtra, match=r"copy .*\.npz from a machine that has it.* pip install 'embedctl\[torch\]'"
    ):
        references_for(FILES, host)


def test_a_host_that_builds_nothing_computes_none(host: Host, computed: list[list[str]]) -> None:
    with pytest.raises(ModelError, match="embedctl model verify mine"):
        references_for(FILES, replace(host, build=False))
    references_for(FILES, host)
    references_for(FILES, replace(host, build=False))
    assert len(computed) == 1


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("budget", [1, 64, 1024, 10**6])
def test_a_backend_that_does_what_torch_does_passes(host: Host, budget: int) -> None:
    report = run_gate(ChunkEncoder(Gated(), budget), HardwareClass(backend="dummy"), host)
    assert report is not None
    assert [check.name for check in report.checks] == [
        "in batches",
        "prompt, raw",
        "alone",
        "beside a longer text",
        "in another order",
    ]
    assert report.figures.endswith("cosine min 1.000000 mean 1.000000")
    assert "FAILED" not in str(report)


@pytest.mark.usefixtures("computed")
def test_another_backend_fails_with_a_table_that_says_where(host: Host) -> None:
    with pytest.raises(GateFailed) as raised:
        run_gate(ChunkEncoder(Gated(seed=1), 1024), HardwareClass(backend="dummy"), host)
    assert raised.value.exit_code == 65
    lines = str(raised.value).splitlines()
    assert lines[0] == "the accuracy gate failed: model mine, backend dummy (sha256), fp32, against torch in fp32"
    assert lines[1].split()[:3] == ["check", "texts", "max"]
    assert lines[2].split()[:2] == ["bound", "1.0e-04"]
    assert [line.endswith("FAILED") for line in lines[3:8]] == [True] * 5


@pytest.mark.usefixtures("computed")
def test_a_gate_that_passed_is_not_run_again_unless_something_changed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(backend: Gated, **options: Any) -> int:
        """How many rows the gate has this backend encode."""
        with patch.object(backend, "forward", wraps=backend.forward) as forward:
            reports.append(run_gate(ChunkEncoder(backend, 1024), HardwareClass(backend="dummy", **options), host))
        return sum(len(call.args[1]) for call in forward.call_args_list)

    reports: list[Report | None] = []
    whole = rows(Gated())
    assert whole > 1
    assert rows(Gated()) == 1
    assert reports[0] == reports[1]
    assert rows(Gated(), max_abs_error=0.01) == whole
    with pytest.raises(GateFailed):  # what it computes is something else by now
        rows(Gated(seed=1))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert rows(Gated()) == whole
    assert rows(Gated()) == 1
    monkeypatch.setattr("embedctl_workers.models.cache._PACKAGE", Path(__file__).parent)
    assert rows(Gated()) == whole


@pytest.mark.usefixtures("computed")
def test_a_text_without_a_vector_fails_it_and_is_named(host: Host) -> None:
    class Broken(Gated):
        def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
            if 1 in tokens.lengths[rows]:
                raise RuntimeError("no text of one token")
            return super().forward(tokens, rows)

    report = measure_backend(ChunkEncoder(Broken(), 1024), HardwareClass(backend="dummy"), host)
    assert report is not None
    assert not report.passed
    assert "in batches: text 'one word': the backend failed: RuntimeError: no text of one token" in str(report)


@pytest.mark.usefixtures("computed")
def test_bounds_of_a_class_s_own_let_pass_what_its_precision_would_not_and_are_shown(host: Host) -> None:
    class Coarse(Gated):
        def finish(self, output: Vectors, *, normalize: bool) -> Vectors:
            noise = np.random.default_rng(0).normal(size=output.shape)
            return super().finish((output + 0.001 * noise).astype(np.float32), normalize=normalize)

    encoder, strict = ChunkEncoder(Coarse(), 1024), HardwareClass(backend="dummy")
    with pytest.raises(GateFailed):
        run_gate(encoder, strict, host)
    report = run_gate(encoder, replace(strict, max_abs_error=0.01), host)
    assert str(report).endswith("bounds set by the class: max_abs_error 0.01")


def test_a_backend_of_which_nothing_is_promised_is_not_measured(host: Host) -> None:
    assert run_gate(ChunkEncoder(DummyBackend(), 1024), HardwareClass(backend="dummy"), host) is None
    assert not host.cache.exists()


def test_a_class_of_16_bits_is_measured_as_its_vectors_are_stored(host: Host, computed: list[list[str]]) -> None:
    def measured(**options: Any) -> tuple[float, float]:
        report = run_gate(ChunkEncoder(Gated(), 4096), HardwareClass(backend="dummy", **options), host)
        assert report is not None
        return report.checks[0].measured.max_abs_error, report.checks[0].measured.length_error

    assert measured(precision="fp32")[0] < 1e-6
    error, length_error = measured(precision="fp16")
    assert 1e-5 < error <= 2**-12
    assert length_error < 1e-6
    assert measured(precision="fp16", max_abs_error=1e-4)[0] < 1e-6
    assert computed


@pytest.mark.usefixtures("computed")
def test_vectors_of_another_length_fail_at_once(host: Host) -> None:
    with pytest.raises(GateFailed, match="have 16 dimensions in torch, and 8 here"):
        run_gate(ChunkEncoder(Gated(dim=8), 1024), HardwareClass(backend="dummy"), host)

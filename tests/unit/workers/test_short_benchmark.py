"""A short benchmark, of the dummy backend and with rates that are made up, and the operations that models need."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl_config.errors import DeviceLost
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass, Precision
from embedctl_workers.arrays.tokens import Side, Tokens
from embedctl_workers.backends.base import Reference
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.measuring import short_benchmark
from embedctl_workers.measuring.matrix_products import MatrixProducts, matrix_products
from embedctl_workers.measuring.rates import mixed_load, working_rate
from embedctl_workers.measuring.short_benchmark import EncoderShape, Spread, benchmark, shape_of
from embedctl_workers.models.files import ModelFiles

BERT = """{"model_type": "bert", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
"num_attention_heads": 1}"""


def encoder_of(token_budget: int = 256, **options: Any) -> ChunkEncoder:
    return ChunkEncoder(DummyBackend(**{"max_tokens": 512, **options}), token_budget)


def fake_products(rates: list[float]) -> Callable[..., MatrixProducts | str]:
    """Matrix products whose speed the test sets, round by round."""
    left = iter(rates)

    class Told(MatrixProducts):
        def rate(self, seconds: float, **_: object) -> float:
            return next(left)

    return lambda hardware, threads: Told("made up", 1.0, lambda: None, lambda: None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that are made up: of the rounds 0 (which does not count), 1, 2, …"""
    count = {"mixed lengths": -1, "long texts": -1}

    def rate(encoder: ChunkEncoder, load: Any, seconds: float) -> float:
        count[load.name] += 1
        return 1e6 if count[load.name] == 0 else 1000.0 * count[load.name]

    monkeypatch.setattr(short_benchmark, "encoding_rate", rate)


def referring(tmp_path: Path, config: str) -> ChunkEncoder:
    (tmp_path / "config.json").write_text(config)
    encoder = encoder_of()
    encoder.backend.reference = Reference(ModelFiles("mine", tmp_path, "ab" * 32))
    return encoder


@pytest.mark.usefixtures("quick")
def test_shares_are_of_one_round_and_the_first_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_benchmark, "matrix_products", fake_products([1e-9, *(1e6 * at for at in range(1, 6))]))
    found = benchmark(referring(tmp_path, BERT), HardwareClass(), 1)
    assert found.notes == []
    assert found.matrix_flop_per_s == Spread(3e6, 1e6, 5e6)
    mixed, long = found.rates
    for rate in (mixed, long):
        assert rate.tokens_per_s == Spread(3000.0, 1000.0, 5000.0)
        assert rate.texts_per_s.median == pytest.approx(3000 / rate.tokens_per_text)
        assert rate.share is not None
        # Both grew together from round to round, so that their ratio stayed as it was.
        assert rate.share.least == pytest.approx(rate.share.most)
    assert mixed.share is not None
    assert long.share is not None
    assert long.share.median > mixed.share.median  # attention
    assert "3,000 (1,000 to 5,000)" in str(found)
    assert "matrix rate: 3e-06 (1e-06 to 5e-06) TFLOP/s, made up" in str(found)


@pytest.mark.parametrize(
    ("hardware", "why"),
    [
        (SHIPPED_CLASSES["neuron"], "Neuron core"),
        (HardwareClass(device="gpu", precision="int8"), "int8"),
        (HardwareClass(precision="fp16"), "this CPU has no instructions for bf16"),
    ],
)
def test_without_products_it_says_why(hardware: HardwareClass, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_workers.measuring.cpu_products.cpu_flags", lambda: frozenset({"avx512f"}))
    products = matrix_products(hardware, 1)
    assert isinstance(products, str)
    assert why in products


def test_the_rate_of_products_is_operations_by_time() -> None:
    now, begun, waits = 0.0, 0, 0

    def multiply() -> None:
        nonlocal begun
        begun += 1

    def wait() -> None:
        nonlocal now, begun, waits
        now, begun, waits = now + 0.001 * begun, 0, waits + 1

    products = MatrixProducts("a millisecond each", 7.0, multiply, wait)
    assert products.rate(0.3, now=lambda: now) == pytest.approx(7.0 / 0.001)
    assert waits < 20  # ever more products between two waits


@pytest.mark.parametrize(("precision", "kind"), [("fp32", "fp32"), ("fp16", "bf16"), ("int8", "int8")])
def test_products_on_the_cpu_are_timed(precision: Precision, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_workers.measuring.matrix_products._ON_CPU", (256, 512))
    monkeypatch.setattr("embedctl_workers.measuring.cpu_products.cpu_flags", lambda: frozenset({"amx_bf16"}))
    products = matrix_products(HardwareClass(precision=precision), 1)
    assert isinstance(products, MatrixProducts)
    assert products.what.startswith(f"{kind}, 256 × 512 × 512 by torch's ")
    rate = products.rate(0.1)
    # They bound the unit, not the speed: a core manages some hundred operations a cycle at most in fp32, and some
    # thousand on a matrix unit.
    assert 1e8 < rate < (1e12 if kind == "fp32" else 1e13)


class Counted(DummyBackend):
    """Counts its calls. A chunk takes a tenth of a second to tokenise, in one thread at a time, as under the GIL."""

    def __init__(self) -> None:
        super().__init__(max_tokens=512)
        self.tokenised = 0
        self.warmed: set[int] = set()
        self._host = threading.Lock()

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        with self._host:
            self.tokenised += 1
            threading.Event().wait(0.1)
        return super().tokenize(texts, prompt, truncation_side)

    def warm_up_thread(self) -> None:
        self.warmed.add(threading.get_ident())


def test_a_workers_whole_work_is_measured_in_its_threads_which_are_warmed_up_first() -> None:
    backend = Counted()
    encoder = ChunkEncoder(backend, 100_000)
    load = mixed_load(encoder)
    for seconds in (0.5, 30.0):
        backend.tokenised = 0
        backend.warmed.clear()
        rate = working_rate(encoder, load, seconds, threads=3)
        assert len(backend.warmed) == 3
        if backend.tokenised >= 4:
            break  # else the machine was busy with something else
    assert backend.tokenised >= 4
    assert 0 < rate < 1.2 * load.lengths.sum() / 0.1
    assert working_rate(encoder, load, 0.0, threads=3, computing=1) > rate  # waiting takes no CPU time


def test_a_thread_that_can_not_be_warmed_up_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Counted()
    encoder = ChunkEncoder(backend, 100_000)
    load = mixed_load(encoder)

    def fail() -> None:
        raise DeviceLost("gone")

    monkeypatch.setattr(backend, "warm_up_thread", fail)
    with pytest.raises(DeviceLost, match="gone"):
        working_rate(encoder, load, 0.1, threads=2)


CONFIG = {
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}
DISTIL = {"model_type": "distilbert", "dim": 384, "hidden_dim": 1536, "n_layers": 6, "n_heads": 12}
SHAPE = EncoderShape(hidden=384, inner=1536, layers=6, heads=12)


def folder_with(tmp_path: Path, config: Any, name: str = "config.json") -> Path:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("config", [CONFIG, {**CONFIG, "model_type": "xlm-roberta"}, DISTIL])
def test_shapes_are_read_as_each_architecture_names_them(tmp_path: Path, config: dict[str, Any]) -> None:
    assert shape_of(folder_with(tmp_path, config)) == SHAPE


def test_the_transformer_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    assert shape_of(folder_with(tmp_path, CONFIG, "0_Transformer/config.json")) == SHAPE


@pytest.mark.parametrize(
    "config", [{**CONFIG, "model_type": "modernbert"}, {}, {"model_type": "bert"}, [], {**CONFIG, "hidden_size": "384"}]
)
def test_of_others_nothing_is_claimed(tmp_path: Path, config: Any) -> None:
    assert shape_of(folder_with(tmp_path, config)) is None
    assert shape_of(tmp_path / "nowhere") is None


def test_torch_counts_the_same(tmp_path: Path) -> None:
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, vocab_size=50)
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).eval()
    shape = shape_of(folder_with(tmp_path, config.to_dict()))
    assert shape is not None
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        for length in (9, 4, 1):
            model.encoder(model.embeddings(torch.zeros(1, length, dtype=torch.long)))
    assert counter.get_total_flops() == shape.flop(np.array([9, 4, 1]))

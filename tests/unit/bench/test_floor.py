"""What the floor of engines is made of: the operations that models need, and the products that do them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from embedctl_bench.peers.adapters.embedctl_adapters import floor, products
from embedctl_bench.peers.adapters.embedctl_adapters.shape import EncoderShape, shape_of


@pytest.mark.parametrize("way", ["mm", "prepacked"])
@pytest.mark.parametrize("kind", ["fp32", pytest.param("bf16", marks=pytest.mark.needs("bf16")), "int8"])
def test_a_product_of_each_kind_multiplies_rows_by_a_weight(kind: str, way: str) -> None:
    chosen = products.PRODUCTS[kind][way]
    x = chosen.source(32, 64)
    assert chosen.prepare(48, 64, 32)(x).shape == (32, 48)


def test_without_instructions_for_bf16_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_flags", lambda: frozenset({"avx512f"}))
    products.check("fp32")
    with pytest.raises(RuntimeError, match="no instructions for bf16"):
        products.check("bf16")


def test_products_are_counted_by_time_with_few_waits() -> None:
    now, begun, waits = 0.0, 0, 0

    def multiply() -> None:
        nonlocal begun
        begun += 1

    def wait() -> None:
        nonlocal now, begun, waits
        now, begun, waits = now + 0.001 * begun, 0, waits + 1

    assert floor.products_per_s(multiply, wait, lambda: now) == pytest.approx(1 / 0.001)
    assert waits < 30  # ever more products between two waits


CONFIG = {
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}
DISTIL = {"model_type": "distilbert", "dim": 384, "hidden_dim": 1536, "n_layers": 6, "n_heads": 12}
SHAPE = EncoderShape(hidden=384, inner=1536, layers=6, heads=12)


def folder_with(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("config", [CONFIG, {**CONFIG, "model_type": "xlm-roberta"}, DISTIL])
def test_shapes_are_read_as_each_architecture_names_them(tmp_path: Path, config: dict[str, Any]) -> None:
    assert shape_of(folder_with(tmp_path, config)) == SHAPE


@pytest.mark.parametrize("config", [{**CONFIG, "model_type": "modernbert"}, {}])
def test_of_others_nothing_is_claimed(tmp_path: Path, config: Any) -> None:
    with pytest.raises(RuntimeError, match="unknown shape"):
        shape_of(folder_with(tmp_path, config))


def test_torch_counts_the_same(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, vocab_size=50)
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).eval()
    shape = shape_of(folder_with(tmp_path, config.to_dict()))
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        for length in (9, 4, 1):
            model.encoder(model.embeddings(torch.zeros(1, length, dtype=torch.long)))
    assert counter.get_total_flops() == shape.flop([9, 4, 1])

"""Operations that models need, by their configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl_workers.measuring.flops import EncoderShape, shape_of

BERT = {"model_type": "bert", "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
DISTIL = {"model_type": "distilbert", "dim": 384, "hidden_dim": 1536, "n_layers": 6}
MINILM = EncoderShape(hidden=384, inner=1536, layers=6)


def folder_with(tmp_path: Path, config: Any, name: str = "config.json") -> Path:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("config", [BERT, {**BERT, "model_type": "xlm-roberta"}, DISTIL])
def test_shapes_are_read_as_each_architecture_names_them(tmp_path: Path, config: dict[str, Any]) -> None:
    assert shape_of(folder_with(tmp_path, config)) == MINILM


def test_the_transformer_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    assert shape_of(folder_with(tmp_path, BERT, "0_Transformer/config.json")) == MINILM


@pytest.mark.parametrize(
    "config", [{**BERT, "model_type": "modernbert"}, {}, {"model_type": "bert"}, [], {**BERT, "hidden_size": "384"}]
)
def test_of_others_nothing_is_claimed(tmp_path: Path, config: Any) -> None:
    assert shape_of(folder_with(tmp_path, config)) is None
    assert shape_of(tmp_path / "nowhere") is None


def test_a_token_costs_two_operations_a_weight_and_more_in_longer_texts() -> None:
    shape = EncoderShape(hidden=2, inner=3, layers=5)
    weights = 5 * (4 * 2 * 2 + 2 * 2 * 3)
    attention = 2 * 2 * 5 * 2  # scores and sums, a multiplication and an addition each, over 2 components in 5 layers
    assert shape.flop(np.array([1])) == 2 * weights + attention
    assert shape.flop(np.array([7])) == 7 * 2 * weights + 49 * attention
    assert shape.flop(np.array([7, 1, 1])) == 9 * 2 * weights + 51 * attention


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
        model.encoder(model.embeddings(torch.zeros(1, 9, dtype=torch.long)))
    assert counter.get_total_flops() == shape.flop(np.array([9]))

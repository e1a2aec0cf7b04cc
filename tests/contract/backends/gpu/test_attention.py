"""Attention over packed texts, torch's own and the one for everything else; a forward asks the device nothing."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from embedctl_workers.backends.gpu import attention
from tests.support.references_here import sentence_transformer
from tests.support.stand_in_gpu import StandIn, Waits, varlen_attn
from tests.support.tiny_models import MakeModel, Tiny
from tests.support.torch_gpu import BERT, QWEN, Load, texts_of, tokens_of


def test_attention_that_is_missing_wrong_or_not_for_these_heads_is_not_used(
    with_varlen: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    half, on = torch.float16, StandIn(varlen=True)
    assert isinstance(attention.attention_for(on, half, 2, 64), attention.Varlen)
    for other, dtype, size in ((on, torch.float32, 64), (on, half, 12), (on, half, 264), (StandIn(), half, 64)):
        assert isinstance(attention.attention_for(other, dtype, 2, size), attention.Bucketed)
    assert caplog.records == []
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *_: torch.zeros_like(query))
    assert isinstance(attention.attention_for(on, half, 2, 64), attention.Bucketed)
    assert "is wrong by" in caplog.text
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *_: torch.full_like(query, torch.nan))
    assert isinstance(attention.attention_for(on, half, 2, 64), attention.Bucketed)
    monkeypatch.undo()
    caplog.clear()
    # torch's own function: the CPU has no kernel for it.
    assert isinstance(attention.attention_for(on, half, 2, 64), attention.Bucketed)
    assert "does not run here" in caplog.text


def test_torch_has_the_attention_that_is_called() -> None:
    wanted = inspect.signature(varlen_attn).parameters
    there = inspect.signature(varlen.varlen_attn).parameters
    assert list(there)[: len(wanted)] == list(wanted)
    others = [each for name, each in there.items() if name not in wanted]
    assert all(each.default is not inspect.Parameter.empty for each in others)


def test_texts_are_attended_to_at_every_edge_of_a_width() -> None:
    torch.manual_seed(0)
    lengths = [1, *(width + more for width in (*attention._WIDTHS, 1024) for more in (-1, 0, 1))]
    for chosen in (lengths, [8], [1], [8, 8], [9, 16, 512, 513]):
        offsets = np.concatenate([[0], np.cumsum(chosen)])
        qkv = torch.randn(int(offsets[-1]), 3, 2, 4)
        found = attention._attend(attention.Bucketed(), qkv, offsets)
        for begin, end in pairwise(offsets.tolist()):
            query, key, value = (part.transpose(0, 1) for part in qkv[begin:end].unbind(1))
            expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(0, 1)
            torch.testing.assert_close(found[begin:end], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_no_batch_waits_for_a_plan_of_cudnn(engine: str, load: Load) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load(dtype="bf16", engine=engine)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # torch has no types for it


ALL_MODES = "cls+max+mean+mean_sqrt_len_tokens+weightedmean+lasttoken"


@pytest.mark.parametrize(
    ("tiny", "engine"),
    [(BERT, "auto"), (BERT, "padded"), (Tiny("mpnet"), "auto"), (Tiny("modernbert"), "auto"), (QWEN, "auto")],
    ids=str,
)
def test_a_forward_never_waits_for_the_device(tiny: Tiny, engine: str, load: Load, tiny_model: MakeModel) -> None:
    tiny = replace(tiny, include_prompt=False, pooling=ALL_MODES)
    backend = load(tiny, dtype="fp32", engine=engine)
    texts = texts_of([3, 9, 9, 13])
    model = sentence_transformer(tiny_model(tiny))
    for prompt in ("", "query: the "):
        tokens = backend.tokenize(texts, prompt)
        expected = model.encode(texts, prompt=prompt)
        for rows in ([0, 1, 2, 3], [1, 2]):  # with padding, and perhaps without
            with Waits() as waits:
                output = backend.forward(tokens, np.array(rows))
            assert waits.seen == []
            found = backend.finish(output, normalize=False)
            np.testing.assert_allclose(found, expected[rows], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tiny", [BERT, QWEN], ids=str)
def test_only_a_batch_with_padding_is_masked(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[bool] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> Any:
        masks.append(options.get("attn_mask") is not None)
        return attend(*args, **options)

    backend = load(tiny, dtype="bf16", engine="padded")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    ids = [[5] * 32, [6] * 32, [7] * 20]
    for rows, masked in (([0, 1], False), ([0, 2], True)):
        masks.clear()
        backend.forward(tokens_of(ids), np.array(rows))
        assert set(masks) == {masked}

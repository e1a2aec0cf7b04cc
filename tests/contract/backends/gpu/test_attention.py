"""Attention over packed texts: torch's own, and the one for everything else."""

from __future__ import annotations

import inspect
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from embedctl_workers.backends.gpu import attention  # noqa: E402
from tests.support.stand_in_gpu import StandIn, varlen_attn  # noqa: E402
from tests.support.torch_gpu import Load, cosines, encode, texts_of  # noqa: E402


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_attention_over_packed_texts_gives_what_padded_attention_gives(
    dtype: str, load: Load, with_varlen: None
) -> None:
    texts = texts_of([1, 7, 8, 9, 30, 2, 2])
    on = StandIn(varlen=True)
    backend = load(on=on, dtype=dtype)
    assert backend.engine.endswith("packed, varlen")
    found = encode(backend, texts).vectors
    assert cosines(found, encode(load(dtype=dtype), texts).vectors).min() > 0.999


def test_attention_that_is_missing_wrong_or_not_for_these_heads_is_not_used(
    with_varlen: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.nn.attention import varlen

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
    from torch.nn.attention.varlen import varlen_attn as real

    wanted = inspect.signature(varlen_attn).parameters
    there = inspect.signature(real).parameters
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
            each = [part.transpose(0, 1) for part in qkv[begin:end].unbind(1)]
            expected = torch.nn.functional.scaled_dot_product_attention(*each).transpose(0, 1)
            torch.testing.assert_close(found[begin:end], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_no_batch_waits_for_a_plan_of_cudnn(engine: str, load: Load) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load(dtype="bf16", engine=engine)
    assert not torch.backends.cuda.cudnn_sdp_enabled()

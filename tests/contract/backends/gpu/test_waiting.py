"""A forward asks the device nothing: pooling and masks are planned on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from embedctl_workers.backends.gpu import pooling  # noqa: E402
from tests.support.stand_in_gpu import Waits  # noqa: E402
from tests.support.tiny_models import Tiny  # noqa: E402
from tests.support.torch_gpu import BERT, QWEN, Load, MakeModel, reference, texts_of, tokens_of  # noqa: E402

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
    model = reference(tiny_model(tiny))
    for prompt in ("", "query: the "):
        tokens = backend.tokenize(texts, prompt)
        expected = model.encode(texts, prompt=prompt)
        for rows in ([0, 1, 2, 3], [1, 2]):  # with padding, and perhaps without
            with Waits() as waits:
                output = backend.forward(tokens, np.array(rows))
            assert waits.seen == []
            found = backend.finish(output, normalize=False)
            np.testing.assert_allclose(found, expected[rows], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("prompt", [None, 0, 3, 9])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("modes", ["mean", "lasttoken", ALL_MODES])
def test_pooling_with_indices_of_the_host_gives_what_its_base_gives(
    modes: str, include: bool, prompt: int | None
) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    lengths = np.array([12, 3, 10, 9, 40])
    base = Pooling(8, tuple(modes.split("+")), include_prompt=include)
    ours = pooling.HostIndexedPooling.like(base)
    assert isinstance(ours, pooling.HostIndexedPooling)
    x = torch.randn(1, 74, 8, generator=torch.Generator().manual_seed(0))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(torch.int32)
    features = {"token_embeddings": x, "cu_seq_lens_q": offsets}
    if prompt is not None:
        features["prompt_length"] = prompt
    indices = {name: torch.from_numpy(each) for name, each in ours.indices(lengths, prompt).items()}
    with Waits() as waits:
        found = ours.forward({**features, **indices})["sentence_embedding"]
    assert waits.seen == []
    torch.testing.assert_close(found, base.forward(dict(features))["sentence_embedding"])


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

"""The packed engine in int8: its kernels against float64, what they do with bad rows, and when it is not used."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from embedctl_config.cpu import LEVEL_VARIABLE, cpu_flags
from embedctl_config.hardware import ModelEntry
from embedctl_workers.backends import int8 as chooser
from embedctl_workers.backends.torch import int8 as backend_module
from embedctl_workers.backends.torch.int8 import TorchInt8Backend
from embedctl_workers.backends.torch.packed import native
from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.fused import VNNI, FusedLayer, Int8Library, Product
from embedctl_workers.backends.torch.packed.inputs import Texts
from embedctl_workers.machine import teams
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import resolve_model
from tests.support.chunks import encode
from tests.support.packed_layers import assemble, in_numpy, some_layer
from tests.support.references_here import sentence_transformer
from tests.support.texts import TEXTS
from tests.support.tiny_models import MakeModel, Tiny

pytestmark = [pytest.mark.needs("compiler"), pytest.mark.usefixtures("seeded")]

Matrix = npt.NDArray[Any]
EMULATED = "-DINT8_EMULATED"
#: The level of CPUs with registers of so many floats. Where it says lanes, VNNI's instruction is emulated in plain C.
LEVEL_OF = {
    "AVX512 without VNNI": "x86-64-v4",
    "AVX2": "x86-64-v3",
    "16 lanes": "x86-64-v4",
    "8 lanes": "x86-64-v3",
    "4 lanes": "x86-64",
}
VARIANTS = (
    pytest.param("native", marks=[pytest.mark.needs("vnni"), pytest.mark.slow]),
    pytest.param("AVX512 without VNNI", marks=[pytest.mark.needs("avx512"), pytest.mark.slow]),
    pytest.param("AVX2", marks=pytest.mark.needs("avx2")),
    pytest.param("8 lanes", marks=[pytest.mark.needs("avx2"), pytest.mark.slow]),
    pytest.param("16 lanes", marks=[pytest.mark.needs("avx512"), pytest.mark.slow]),
    pytest.param("4 lanes", marks=[pytest.mark.needs("x86"), pytest.mark.slow]),
)
#: Inputs × outputs of products; rows that leave a rest of a tile and of a block.
SHAPES = ((48, 80), (384, 192))
ROWS = (1, 5, 6, 7, 200)
BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture(scope="module", params=VARIANTS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Int8Library:
    level = LEVEL_OF.get(request.param)
    with pytest.MonkeyPatch.context() as patch:
        if level:
            patch.setenv(LEVEL_VARIABLE, level)
        return Int8Library(
            Host(threads=1, cache=tmp_path_factory.mktemp("cache")), (EMULATED,) if "lanes" in request.param else ()
        )


@pytest.fixture
def runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    if not chooser._BYTE_PRODUCTS & cpu_flags():
        monkeypatch.setattr(chooser, "_BYTE_PRODUCTS", cpu_flags())
        monkeypatch.setattr(backend_module, "FLAGS", (EMULATED,))


def linear(library: Int8Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The product, with a row after its result that must stay as it is."""
    y = torch.full((len(x) + 1, len(weight)), 7.0)
    library.linear(x, Product(weight.numpy(), bias.numpy(), library), y[:-1], Buffers())
    assert (y[-1] == 7).all()
    return y[:-1]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Matrix:
    product: Matrix = x.double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    return product


def quantised(x: Matrix) -> Matrix:
    """What is left of each row after it is mapped to 0…255 and back."""
    low = x.min(axis=1, keepdims=True)
    step = np.maximum((x.max(axis=1, keepdims=True) - low) / 255, 1e-300)
    back: Matrix = low + step * np.rint((x - low) / step)
    return back


def rounded(weight: Matrix, most: int) -> Matrix:
    """What is left of each output's weights after they are mapped to -most…most and back."""
    scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True) / most, 1e-300)
    back: Matrix = scale * np.rint(weight / scale)
    return back


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_of_what_bytes_hold_is_exact(library: Int8Library, shape: tuple[int, int]) -> None:
    """Rows and weights on the grids that they are mapped to lose nothing: what is left is float32's own rounding."""
    inputs, outputs = shape
    for rows in ROWS:
        most = library.most_byte
        x, weight = torch.randint(0, 256, (rows, inputs)), torch.randint(-most, most + 1, (outputs, inputs))
        x[:, :2], weight[0] = torch.tensor([0, 255]), most
        weight[:, 2] = most
        x = (x - torch.randint(0, 256, (rows, 1))) * 2.0 ** torch.randint(-9, 3, (rows, 1))
        weight, bias = weight * 2.0 ** torch.randint(-12, -3, (outputs, 1)), torch.randn(outputs)
        error = np.abs(linear(library, x, weight, bias).numpy() - exact(x, weight, bias))
        assert (error <= 2e-6 * (exact(x.abs(), weight.abs(), bias.abs()))).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_nearest_bytes(library: Int8Library, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    weight, bias = torch.randn(outputs, inputs), torch.zeros(outputs)
    for rows, magnitude in itertools.product(ROWS, (1.0, 1e12, 1e-12)):
        x = torch.randn(rows, inputs) * magnitude * 10 ** (torch.rand(rows, 1) * 4 - 2)
        found = linear(library, x, weight, bias).double().numpy()
        expected = quantised(x.double().numpy()) @ rounded(weight.double().numpy(), library.most_byte).T
        # A number halfway between two bytes may go to either.
        unit = (x.amax(1) - x.amin(1)).double().numpy()[:, None] / 255 * weight.abs().amax(1).double().numpy()
        assert (np.abs(found - expected) <= 2.01 * unit).all()
        assert np.mean(np.abs(found - expected) > 1e-4 * unit + 1e-5 * np.abs(expected).max(1, keepdims=True)) < 0.02


def test_a_row_that_is_not_finite_stays_so_alone(library: Int8Library) -> None:
    weight, bias, x = torch.randn(80, 48), torch.randn(80), torch.randn(20, 48)
    good = linear(library, x, weight, bias)
    for column, bad in itertools.product((0, 17, 47), BAD):
        spoilt = x.clone()
        spoilt[13, column] = bad
        found = linear(library, spoilt, weight, bias)
        assert not found[13].isfinite().any()
        others = torch.arange(20) != 13
        assert torch.equal(found[others], good[others])


def test_a_row_is_the_same_alone_beside_others_and_on_any_number_of_threads(library: Int8Library) -> None:
    weight, bias, x = torch.randn(192, 64), torch.randn(192), torch.randn(230, 64)
    both = linear(library, x, weight, bias)
    assert torch.equal(linear(library, x.flip(0).contiguous(), weight, bias).flip(0), both)
    assert torch.equal(linear(library, x[101:102].contiguous(), weight, bias)[0], both[101])
    teams.set_threads(1)
    assert torch.equal(linear(library, x, weight, bias), both)


@pytest.mark.needs("x86")
@pytest.mark.parametrize(
    ("name", "march"),
    [("layers.c", "alderlake"), ("layers.c", "skylake-avx512"), ("int8_attention.c", "icelake-server")],
)
def test_the_instructions_of_other_cpus_are_assembled(name: str, march: str, tmp_path: Path) -> None:
    assemble(Path(native.__file__).with_name(name), tmp_path, f"-march={march}")


# ---- attention


def attention(library: Int8Library, qkv: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    heads, tokens, head = len(qkv) // 3, qkv.shape[1], qkv.shape[2]
    context = torch.full((tokens + 1, heads * head), 7.0)
    texts = Texts.at(np.concatenate([[0], np.cumsum(lengths)]))
    library.attention(qkv, texts, context[:-1], Buffers())
    assert (context[-1] == 7).all()
    return context[:-1]


def attention_exact(qkv: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    heads = len(qkv) // 3
    parts = []
    for text in torch.split(qkv.double(), list(lengths), dim=1):
        q, k, v = text[:heads], text[heads : 2 * heads], text[2 * heads :]
        one = torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v
        parts.append(one.transpose(0, 1).reshape(one.shape[1], -1))
    return torch.cat(parts)


def some_qkv(heads: int, head: int, tokens: int) -> torch.Tensor:
    qkv = torch.randn(3 * heads, tokens, head)
    qkv[:heads] *= head**-0.5
    return qkv


@pytest.mark.parametrize(("heads", "head"), [(1, 16), (3, 48), (1, 256)])
def test_attention_is_that_of_torch_within_what_int8_may_differ(library: Int8Library, heads: int, head: int) -> None:
    for lengths in ((1,), (2, 1), (17, 15, 1, 33), (3, 8, 9, 7, 64), (257,), (5,) * 9):
        qkv = some_qkv(heads, head, sum(lengths))
        error = (attention(library, qkv, lengths) - attention_exact(qkv, lengths)).abs()
        assert error.max() < 0.06
        assert error.mean() < 0.006


@pytest.mark.parametrize("length", [513, 1200])
def test_attention_over_long_texts_neither_overflows_nor_loses_small_weights(library: Int8Library, length: int) -> None:
    """All values have the greatest magnitude, so the sums are as large as they may be; one token draws half."""
    qkv = some_qkv(1, 16, length)
    qkv[2] = 3.0
    torch.testing.assert_close(attention(library, qkv, [length]), torch.full((length, 16), 3.0), atol=0.02, rtol=0)
    qkv[0], qkv[1], qkv[2] = 0, 0, -1.0
    qkv[0, :, 0], qkv[1, 0, 0], qkv[2, 0] = 1.0, float(np.log(length - 1)), 1.0
    assert attention(library, qkv, [length]).abs().max() < 0.03


def test_attention_stands_large_and_small_scores(library: Int8Library) -> None:
    qkv = torch.randn(6, 40, 32) * 30
    assert (attention(library, qkv, [40]) - attention_exact(qkv, [40])).abs().mean() < 2
    for magnitude in (1e12, 1e-12, 0.0):
        qkv = some_qkv(2, 32, 40)
        qkv[4:] *= magnitude
        error = (attention(library, qkv, [40]) - attention_exact(qkv, [40])).abs()
        assert error.max() <= 0.06 * magnitude
        qkv[:4] = 0
        expected = qkv[4:].mean(1).flatten().expand(40, -1)
        torch.testing.assert_close(attention(library, qkv, [40]), expected, atol=max(1e-3 * magnitude, 1e-30), rtol=0)


def test_a_text_that_is_not_finite_stays_so_alone(library: Int8Library) -> None:
    qkv = some_qkv(2, 32, 30)
    good = attention(library, qkv, [7, 10, 13])
    others = torch.tensor([*range(7), *range(17, 30)])
    for bad, part in itertools.product(BAD, ("query", "key", "value")):
        spoilt = qkv.clone()
        spoilt[{"query": 0, "key": 2, "value": 4}[part], 12, 5] = bad
        found = attention(library, spoilt, [7, 10, 13])
        # A query is of one token, and keys and values are of all tokens of their text.
        assert not found[12 if part == "query" else slice(7, 17), :32].isfinite().any()
        assert torch.equal(found[others], good[others])


# ---- layers


def rest_exact(x: torch.Tensor, context: torch.Tensor, layer: Any, most: int) -> torch.Tensor:
    """What follows attention, in float64, with the rounding to bytes."""

    def product(x: torch.Tensor, module: torch.nn.Linear) -> torch.Tensor:
        weight = torch.from_numpy(rounded(module.weight.double().numpy(), most))
        return torch.from_numpy(quantised(x.numpy())) @ weight.T + module.bias.double()

    def norm(x: torch.Tensor, module: torch.nn.LayerNorm) -> torch.Tensor:
        weight, bias = module.weight.double(), module.bias.double()
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, module.eps)

    between = norm(x.double() + product(context.double(), layer.out), layer.attention_norm)
    inner = torch.nn.functional.gelu(product(between, layer.up))
    return norm(between + product(inner, layer.down), layer.norm)


def test_the_rest_of_a_layer_is_that_of_torch_on_the_same_bytes(library: Int8Library) -> None:
    hidden = 64
    layer = some_layer(hidden, 136)
    laid_out = FusedLayer(in_numpy(layer), hidden // 32, library)
    for tokens in (1, 7, 110):
        x, context = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
        found = torch.cat([x, torch.full((1, hidden), 7.0)])
        library.rest(found[:-1], context, laid_out, Buffers())
        assert (found[-1] == 7).all()
        error = (found[:-1] - rest_exact(x, context, layer, library.most_byte)).abs()
        assert error.max() < 0.05
        assert error.mean() < 2e-3


def test_gelu_is_that_of_torch_all_along_the_line(library: Int8Library) -> None:
    """Through a layer whose other parts do nothing: bytes leave of each number its row's 255th part."""
    layer = some_layer(16, 16)
    for module in (layer.out, layer.up, layer.down):
        module.weight.copy_(torch.eye(16) * (module is not layer.out))
        module.bias.zero_()
    laid_out = FusedLayer(in_numpy(layer), 1, library)
    x = torch.randn(500, 16) * 10 ** (torch.rand(500, 1) * 3 - 1)
    found = x.clone()
    library.rest(found, torch.zeros(500, 16), laid_out, Buffers())
    expected = rest_exact(x, torch.zeros(500, 16), layer, library.most_byte)
    assert (found - expected).abs().max() < 0.05
    assert (found - expected).abs().mean() < 1e-3


# ---- models


@pytest.mark.parametrize(("family", "pooling"), [("bert", "mean"), ("xlm-roberta", "mean"), ("distilbert", "cls")])
def test_vectors_are_close(runnable: None, family: Any, pooling: str, tiny_model: MakeModel, host: Host) -> None:
    folder = tiny_model(Tiny(family, pooling=pooling, hidden=64, heads=2))
    backend = TorchInt8Backend(resolve_model("tiny", ModelEntry(source=str(folder))), host)
    assert backend.engine == f"packed, int8, {'VNNI' if VNNI & cpu_flags() else 'AVX2'}"
    found = encode(backend, TEXTS, normalize=True).vectors
    expected = sentence_transformer(folder).encode(TEXTS, normalize_embeddings=True)
    cosines = (found * expected).sum(axis=1)
    assert cosines.min() > 0.99
    assert cosines.mean() > 0.998
    np.testing.assert_array_equal(encode(backend, TEXTS[::-1], normalize=True).vectors[::-1], found)


@pytest.fixture
def onnx_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from embedctl_workers.backends.onnx.backend import OnnxInt8Backend

    asked: list[str] = []
    monkeypatch.setattr(OnnxInt8Backend, "load", lambda model, *_: asked.append(model))
    return asked


@pytest.mark.parametrize("missing", ["AVX2", "compiler", "family"])
def test_where_something_is_missing_onnxruntime_does_it_and_one_line_says_why(
    missing: str,
    runnable: None,
    onnx_loads: list[str],
    tiny_model: MakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, chooser.__name__)
    if missing == "AVX2":
        monkeypatch.setattr(chooser, "_BYTE_PRODUCTS", set())
    if missing == "compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    entry = ModelEntry(source=str(tiny_model(Tiny("mpnet", hidden=64) if missing == "family" else Tiny(hidden=64))))
    chooser.Int8Backend.load("tiny", entry, Host(threads=1, cache=tmp_path / "cache"), {})
    assert onnx_loads == ["tiny"]
    (record,) = caplog.records
    assert missing in record.getMessage()


def test_a_row_that_is_not_finite_stays_so_through_a_layer(library: Int8Library) -> None:
    laid_out = FusedLayer(in_numpy(some_layer(64, 136)), 2, library)
    x, context, others = torch.randn(20, 64), torch.randn(20, 64), torch.arange(20) != 13
    good = x.clone()
    library.rest(good, context, laid_out, Buffers())
    for bad in BAD:
        found, spoilt = x.clone(), context.clone()
        spoilt[13, 5] = bad
        library.rest(found, spoilt, laid_out, Buffers())
        assert not found[13].isfinite().any()
        assert torch.equal(found[others], good[others])

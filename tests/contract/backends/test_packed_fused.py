"""Own products in float32, each with what follows it, against torch."""

from __future__ import annotations

import pytest
import torch

from embedctl_config.cpu import LEVEL_VARIABLE
from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.fused import FloatLibrary, FusedLayer, Product
from embedctl_workers.backends.torch.packed.torch_kernels import TorchKernels
from embedctl_workers.machine.host import Host
from tests.support.packed_layers import in_numpy, some_layer

pytestmark = [pytest.mark.needs("compiler"), pytest.mark.usefixtures("seeded")]

#: Inputs × outputs: a rest of a panel, and more inputs than the first cache takes at a time.
SHAPES = ((48, 80), (1040, 64))
#: Rows that leave a rest of a tile and of a block.
ROWS = (1, 11, 12, 13, 400)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("x86-64-v4", marks=pytest.mark.needs("avx512")),
        pytest.param("x86-64-v3", marks=pytest.mark.needs("avx2")),
        pytest.param("x86-64", marks=[pytest.mark.needs("x86"), pytest.mark.slow]),
        pytest.param("", marks=pytest.mark.slow),
    ],
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FloatLibrary:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv(LEVEL_VARIABLE, request.param)
        return FloatLibrary(Host(threads=1, cache=tmp_path_factory.mktemp("cache")), TorchKernels())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_torchs_and_a_row_does_not_depend_on_others(library: FloatLibrary, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    product = Product(weight.numpy(), bias.numpy(), library)
    for rows in ROWS:
        x, y = torch.randn(rows, inputs), torch.full((rows + 1, outputs), 7.0)
        library.linear(x, product, y[:-1], Buffers())
        assert (y[-1] == 7).all()
        expected = (x.double() @ weight.double().T + bias.double()).float()
        torch.testing.assert_close(y[:-1], expected, atol=2e-4, rtol=1e-5)
        x[0, 3], again = torch.nan, torch.empty(rows, outputs)
        library.linear(x, product, again, Buffers())
        assert not again[0].isfinite().any()
        assert torch.equal(again[1:], y[1:-1])


def test_the_rest_of_a_layer_is_torchs(library: FloatLibrary) -> None:
    """With more inner numbers than a block of rows has at a time."""
    hidden = 64
    layer = some_layer(hidden, 1000)
    laid_out = FusedLayer(in_numpy(layer), 2, library)
    for tokens in ROWS:
        x, context = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
        between = layer.attention_norm(x + layer.out(context))
        expected = layer.norm(between + layer.down(torch.nn.functional.gelu(layer.up(between))))
        found = torch.cat([x, torch.full((1, hidden), 7.0)])
        library.rest(found[:-1], context, laid_out, Buffers())
        assert (found[-1] == 7).all()
        torch.testing.assert_close(found[:-1], expected, atol=2e-5, rtol=1e-5)

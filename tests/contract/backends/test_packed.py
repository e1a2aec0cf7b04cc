"""The packed engine: each kernel against torch over shapes and edges, the way to them, and what is refused."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from embedctl_config.cpu import LEVEL_VARIABLE
from embedctl_workers.backends.torch.packed.inputs import Tables, Texts, positions_of
from embedctl_workers.backends.torch.packed.kernels import CompiledKernels, Kernels, load_kernels
from embedctl_workers.backends.torch.packed.layers import by_heads
from embedctl_workers.backends.torch.packed.linear import BlasLinear, OneDnnLinear
from embedctl_workers.backends.torch.packed.torch_kernels import TorchKernels
from embedctl_workers.backends.torch.packed.weights import Part
from embedctl_workers.machine import teams
from embedctl_workers.machine.host import Host
from embedctl_workers.models import compiling
from embedctl_workers.models.cache import private_folder

pytestmark = [pytest.mark.needs("compiler"), pytest.mark.usefixtures("seeded")]

#: Multiples of a vector's lanes, fewer than one vector, and everything that leaves a rest.
WIDTHS = (1, 3, 7, 8, 15, 16, 17, 24, 33, 40, 384, 768, 1000)
HEADS = ((1, 1), (2, 3), (3, 8), (2, 12), (12, 32), (4, 40), (2, 64), (1, 96), (1, 128))
#: Levels of CPUs; empty is that of this one. The last is as wide as NEON.
LEVELS = (
    pytest.param("", id="native"),
    pytest.param("x86-64-v3", marks=[pytest.mark.needs("avx2"), pytest.mark.slow]),
    pytest.param("x86-64", marks=[pytest.mark.needs("x86"), pytest.mark.slow]),
)
TEXTS = ((1,), (2, 1), (16,), (17, 15, 1, 33), (3, 8, 9, 7, 64), (257,), (5,) * 40, (511, 1, 130))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=LEVELS)
def each_compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CompiledKernels:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv(LEVEL_VARIABLE, request.param)
        return _compile(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def compiled(cache: Path) -> CompiledKernels:
    return _compile(cache)


def _compile(cache: Path) -> CompiledKernels:
    found = load_kernels(Host(threads=1, cache=cache))
    assert isinstance(found, CompiledKernels)
    return found


def norm(width: int, eps: float = 1e-12) -> Part:
    return Part(torch.randn(width).numpy(), torch.randn(width).numpy(), eps)


def texts(lengths: Sequence[int]) -> Texts:
    return Texts.at(np.concatenate([[0], np.cumsum(lengths)]))


def assert_close(found: torch.Tensor, expected: torch.Tensor, atol: float = 2e-6, rtol: float = 2e-6) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def gelu(kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    kernels.gelu(found)
    return found


def test_attention_is_that_of_torch(each_compiled: CompiledKernels) -> None:
    for (count, size), lengths in itertools.product(HEADS, TEXTS):
        hidden, tokens = count * size, sum(lengths)
        joined = torch.randn(tokens, 3 * hidden)
        joined[:, :hidden] *= size**-0.5
        expected = torch.empty(tokens, hidden)
        TorchKernels().attention(by_heads(joined, count), texts(lengths), expected)
        for qkv in (by_heads(joined, count), by_heads(joined, count).contiguous()):
            found = torch.full((tokens + 1, hidden), 7.0)
            each_compiled.attention(qkv, texts(lengths), found[:-1])
            assert (found[-1] == 7).all()
            assert_close(found[:-1], expected, atol=1e-5)


def test_what_is_done_to_rows_of_any_width_is_that_of_torch(each_compiled: CompiledKernels) -> None:
    for width in WIDTHS:
        weights = norm(width, eps=1e-5)
        for tokens in (1, 5, 130):
            x, y = torch.randn(tokens, width) * 3, torch.randn(tokens, width)
            found, expected = x.clone(), x.clone()
            each_compiled.add_layer_norm(found, y, weights)
            TorchKernels().add_layer_norm(expected, y, weights)
            assert_close(found, expected, atol=1e-5)

        tables = Tables(torch.randn(50, width).numpy(), torch.randn(20, width).numpy(), weights)
        ids, positions = np.array([0, 49, 7, 7, 1]), np.array([0, 1, 19, 0, 5])
        found, expected = torch.full((5, width), torch.nan), torch.empty(5, width)
        each_compiled.embed(ids, positions, tables, found)
        TorchKernels().embed(ids, positions, tables, expected)
        assert_close(found, expected, atol=1e-5)

        x = torch.randn(7, width) * 4
        assert_close(gelu(each_compiled, x), gelu(TorchKernels(), x))


def test_gelu_is_right_all_along_the_line(each_compiled: CompiledKernels) -> None:
    x = torch.cat([torch.linspace(-12, 12, 20011), torch.tensor([-1e30, -100.0, -0.0, 0.0, 1e-30, 100.0, 1e30])])[None]
    expected = torch.nn.functional.gelu(x.double()).float()
    assert_close(gelu(each_compiled, x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_and_with_its_own_text(each_compiled: CompiledKernels, bad: float) -> None:
    qkv = torch.randn(30, 3 * 32)
    qkv[12] = bad
    context = torch.empty(30, 32)
    each_compiled.attention(by_heads(qkv, 2), texts([7, 10, 13]), context)
    assert not context[7:17].isfinite().any()
    assert context[:7].isfinite().all()
    assert context[17:].isfinite().all()
    x = torch.zeros(2, 33)
    x[1, 32] = bad
    if bad != -torch.inf:  # GELU of it is -0
        assert not gelu(each_compiled, x)[1, 32].isfinite()
    each_compiled.add_layer_norm(x, torch.zeros(2, 33), norm(33))
    assert x[0].isfinite().all()
    assert not x[1].isfinite().any()


@pytest.mark.parametrize("product", [BlasLinear, OneDnnLinear])
@pytest.mark.parametrize("shape", [(1, 1), (24, 40), (384, 1536), (1000, 3)], ids=str)
def test_products_are_linear_layers(product: type[BlasLinear] | type[OneDnnLinear], shape: tuple[int, int]) -> None:
    weight, bias = torch.randn(*shape), torch.randn(shape[0])
    for rows in (1, 2, 33, 700):
        x = torch.randn(rows, shape[1])
        expected = torch.nn.functional.linear(x, weight, bias)
        assert_close(product(weight, bias)(x), expected, atol=1e-4, rtol=1e-4)
        if product.FUSES_GELU:
            fused = product(weight, bias, gelu=True)(x)
            assert_close(fused, torch.nn.functional.gelu(expected), atol=1e-4, rtol=1e-4)


def test_robertas_positions_begin_behind_the_padding_token_and_leave_it_out() -> None:
    ids, at = np.array([0, 5, 2, 0, 1, 6, 1, 7, 2]), np.array([0, 3, 9])
    assert positions_of(ids, at, None).tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert positions_of(ids, at, 1).tolist() == [2, 3, 4, 2, 1, 3, 1, 4, 5]


def test_kernels_are_compiled_once(compiled: CompiledKernels, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list((cache / "kernels").iterdir())) == 1
    monkeypatch.setattr(compiling, "_run", lambda _: pytest.fail("compiled again"))
    assert load_kernels(Host(threads=1, cache=cache)).name == compiled.name


@pytest.mark.parametrize("reply", ["exit 1", "exit 0", ""], ids=["fails", "makes nothing", "is none"])
def test_a_compiler_that_does_not_work_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reply: str
) -> None:
    if reply:
        broken = tmp_path / "gcc"
        broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{reply}\n')
        broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_kernels(Host(threads=1, cache=tmp_path / "cache")).name == TorchKernels.name
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert ("no C compiler" in caplog.text) is (not reply)


def test_an_open_cache_is_not_run(compiled: CompiledKernels, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(stat.S_IRWXU | stat.S_IWOTH)
    assert load_kernels(Host(threads=1, cache=tmp_path)).name == TorchKernels.name
    assert "chmod go-w" in caplog.text


def test_a_damaged_library_is_made_again(compiled: CompiledKernels, cache: Path, tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "kernels")
    damaged = [folder / each.name for each in (cache / "kernels").iterdir()]
    for each in damaged:
        each.write_bytes(b"not a library")
    assert load_kernels(Host(threads=1, cache=tmp_path)).name == compiled.name
    assert all(each.stat().st_size > 1000 for each in damaged)


def test_one_openmp_serves_torch_and_the_kernels(compiled: CompiledKernels) -> None:
    runtimes = teams.openmp_runtimes()
    assert len({Path(path).name.partition("-")[0].partition(".")[0] for path in runtimes}) == 1

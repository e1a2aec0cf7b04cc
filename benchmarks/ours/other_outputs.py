"""The probes of sparse vectors and multi-vectors: their speed and agreement beside sentence-transformers'."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from benchmarks.ours.service import Figures
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tests.support.other_outputs import make_multi, make_sparse
from tests.support.passages import passages
from tests.support.tiny_models import Tiny
from transformers import AutoConfig, AutoModelForMaskedLM

from embedctl_bench.measuring.sampling import least
from embedctl_bench.peers.child import ChildProcess
from embedctl_bench.peers.environments import environment_for, python_of
from embedctl_bench.peers.models import peers_folder
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.known_good import load_encoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.files import resolve_model

#: A word has a weight if it is above this.
_TERM = 1e-3
#: Families with a masked language model.
MaskedFamily = Literal["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert"]


def other_outputs(
    *,
    output: str = "sparse",
    model: str = "all-MiniLM-L6-v2",
    classes: str = "cpu",
    texts: int = 256,
    batch: int = 32,
    rounds: int = 7,
    peers: str = "",
) -> Figures:
    """CPU seconds for passages, the least of so many rounds: through an encoder of a worker of each of these classes,
    and `encode` of the class of sentence-transformers in batches of `batch`; with the peer `pylate`, PyLate's, too. The
    model's encoder gets a head of random weights."""
    torch.set_num_threads(1)
    settings = Settings()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder, source = Path(scratch), resolve_model(model).folder
        (_sparse if output == "sparse" else _multi)(source, folder)
        host = Host(1, cache_folder(settings))
        own = {
            each: load_encoder(settings, settings.hardware_class(each), str(folder), host)
            for each in classes.split(",")
        }
        kind = SparseEncoder if output == "sparse" else MultiVectorEncoder
        other: Any = kind(str(folder), device="cpu")
        corpus = passages(texts)
        chunk = ChunkInput(0, bytes(len(corpus)), [text.encode() for text in corpus])
        contenders: list[tuple[str, Callable[[], float]]] = [
            *((name, partial(_cpu_s, partial(_encode, encoder, chunk, output))) for name, encoder in own.items()),
            (kind.__name__, partial(_cpu_s, lambda: other.encode(corpus, batch_size=batch, show_progress_bar=False))),
        ]
        if peers == "pylate":
            pylate = stack.enter_context(closing(_pylate(peers_folder(settings), source, other.max_seq_length)))
            contenders.append(("PyLate", lambda: pylate.call(texts=corpus, batch=batch)["cpu_s"]))
        seconds = least(contenders, rounds)
    figures = {f"{name}: CPU s for 1,000 texts": 1000 * each / texts for name, each in seconds.items()}
    others = seconds.keys() - own.keys()
    return {**figures, **{f"{name} x {each}": seconds[each] / seconds[name] for name in own for each in sorted(others)}}


def _pylate(place: Path, model: Path, longest: int) -> ChildProcess:
    package, variables = environment_for("pylate")
    command = [str(python_of("pylate", place)), "-P", "-m", f"{package}.pylate", str(model), str(longest)]
    return ChildProcess(command, variables, place / "pylate.log")


def _encode(encoder: ChunkEncoder, chunk: ChunkInput, output: str) -> None:
    encoder.encode(encoder.prepare(chunk, {"vectors": [output]}))


def _cpu_s(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def agreement(*, backends: str = "torch,onnx") -> Figures:
    """The largest difference of a weight, or of a number of a token's vector, from sentence-transformers', by family
    and backend; infinity if a text has other tokens, or another word with a weight above 1e-3. Small models of random
    weights, documents and queries."""
    found: Figures = {}
    corpus = [*passages(40), "w1", "w2 , w3 ."]
    chunk = ChunkInput(0, bytes(len(corpus)), [text.encode() for text in corpus])
    for family in get_args(MaskedFamily):
        for output, make in (("sparse", make_sparse), ("multi", make_multi)):
            with tempfile.TemporaryDirectory() as scratch:
                # In windows of attention as small as these, some tokens of an expanded query would attend to none.
                how: dict[str, Any] = {"attend": True} if (family, output) == ("modernbert", "multi") else {}
                folder = make(Path(scratch), Tiny(family), **how)
                for backend in backends.split(","):
                    own = load_encoder(Settings(), HardwareClass(backend=backend), str(folder), Host(1, Path(scratch)))
                    for prompt in ("document", "query"):
                        options = {"vectors": [output], "prompt_name": prompt}
                        cells = own.encode(own.prepare(chunk, options)).vectors[:, 0]
                        apart = _apart(folder, output, prompt, corpus, cells)
                        name = f"{family}, {output}, {backend}"
                        found[name] = max(found.get(name, 0.0), apart)
    return found


def _apart(folder: Path, output: str, prompt: str, corpus: list[str], cells: Any) -> float:
    model: Any = (SparseEncoder if output == "sparse" else MultiVectorEncoder)(str(folder), device="cpu")
    expected = (model.encode_query if prompt == "query" else model.encode_document)(corpus, show_progress_bar=False)
    worst = 0.0
    for cell, text in zip(cells, expected.to_dense() if output == "sparse" else expected, strict=True):
        row, mine = text.numpy(), cell
        if output == "sparse":
            mine = np.zeros_like(row)
            mine[cell["index"]] = cell["weight"]
        same = mine.shape == row.shape and (output == "multi" or ((mine > _TERM) == (row > _TERM)).all())
        worst = max(worst, float(np.abs(mine - row).max()) if same else math.inf)
    return worst


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

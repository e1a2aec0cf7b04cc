"""The systems of this environment that turn a request's texts into vectors: our classes, and others to compare with.

It imports libraries that size their thread pools as they load, so pin the process first.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embedctl_bench.peers.adapters.embedctl_adapters.samples import UNSHOWN, Runner, Steps
from embedctl_bench.peers.registry import FLOOR, SENTENCE_TRANSFORMERS, TRANSFORMERS, class_entry
from embedctl_config.errors import ModelError
from embedctl_config.hardware import HardwareClass, ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.arrays.batching import batches_of
from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors, padded
from embedctl_workers.backends.base import Backend
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import MANIFEST, ArtifactStore
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.tuning import token_budget

if TYPE_CHECKING:
    from embedctl_bench.peers.adapters.embedctl_adapters.floor import FloorAdapter

#: Files in an artefact's folder besides the graph.
_NO_GRAPH = {MANIFEST, "model.json", "tokenizer.json"}
#: Most rows in one product of the floor, because more are no faster.
_FLOOR_ROWS = 4096
_NO_LIMIT = 1 << 30


def load_runner(runner: str, hardware: str, settings: Settings, files: ModelFiles, host: Host) -> Runner:
    """Load a system of this environment.

    Args:
        runner, hardware: of its :class:`~embedctl_bench.peers.registry.System`.

    Raises:
        SettingsError, MissingExtra, ModelError: it can't be loaded.
    """
    others: dict[str, Callable[[ModelFiles, Host], Runner]] = {
        TRANSFORMERS.runner: TransformersRunner,
        SENTENCE_TRANSFORMERS.runner: SentenceTransformersRunner,
        FLOOR.runner: FloorRunner,
    }
    if runner in others:
        return others[runner](files, host)
    return ClassRunner(settings, class_entry(hardware, settings), files, host)


class ClassRunner:
    """A hardware class's backend in the steps of a worker: tokenise, cut into batches within the token budget, pool.

    Requests of several threads share it as chunks share a worker: one is on the device, others are before or after it.
    """

    def __init__(self, settings: Settings, hardware: HardwareClass, files: ModelFiles, host: Host) -> None:
        from embedctl_workers.backends import load_backend

        # The name is for messages about artefacts. The folder is given because a shape's model has no other source.
        entry = ModelEntry(source=str(files.folder))
        backend = load_backend(hardware.backend, files.name, entry=entry, host=host, options=hardware.options)
        backend.warm_up()
        self._backend: Backend = backend
        self._budget = token_budget(
            hardware, backend.fingerprint, threads=host.threads, cache=host.cache, default=backend.token_budget
        )
        self._device = InOrder()
        self.engine = f"{backend.engine}; token budget {self._budget}"
        self.max_tokens = backend.max_tokens
        self.model_bytes = _graph_bytes(hardware, files, host) or _weights_bytes(files)

    def run(self, texts: Sequence[str]) -> tuple[Vectors, Steps]:
        clock = _Clock()
        tokens, batches = self._prepare(texts)
        vectors = np.empty((len(texts), self._backend.dim), np.float32)
        pre = clock.lap()
        with self._device.turn():
            predict, post = self._encode(tokens, batches, vectors)
        return vectors, (pre, predict, post)

    def count(self, texts: Sequence[str]) -> tuple[int, int]:
        tokens, batches = self._prepare(texts)
        computed = sum(self._backend.positions(tokens.lengths[batch]) for batch in batches)
        return int(tokens.lengths.sum()), computed

    def _prepare(self, texts: Sequence[str]) -> tuple[Tokens, list[Rows]]:
        tokens = self._backend.tokenize(texts, None)
        backend = self._backend
        return tokens, batches_of(tokens.lengths, self._budget, backend.batch_cost, by_sum=backend.budget_by_sum)

    def _encode(self, tokens: Tokens, batches: Sequence[Rows], vectors: Vectors) -> tuple[float, float]:
        """Fill the vectors; return seconds on the device, and after it."""
        begun: deque[tuple[Rows, Any]] = deque()
        clock = _Clock()
        predict = post = 0.0

        def finish(but: int) -> float:
            while len(begun) > but:
                rows, output = begun.popleft()
                vectors[rows] = self._backend.finish(output, normalize=True)
            return clock.lap()

        for rows in batches:
            begun.append((rows, self._backend.forward(tokens, rows)))
            predict += clock.lap()
            post += finish(self._backend.ahead)
        post += finish(0)
        # If the device works ahead, finishing means waiting for it.
        return (predict + post, 0.0) if self._backend.ahead else (predict, post)


class FloorRunner:
    """A model's matrix products alone, without padding, with torch's faster product for the number of tokens."""

    def __init__(self, files: ModelFiles, host: Host) -> None:
        from embedctl_bench.peers.adapters.embedctl_adapters.floor import FloorAdapter

        self._products = [FloorAdapter(files.folder, host.threads, each, _FLOOR_ROWS) for each in ("mm", "prepacked")]
        self._fastest: dict[int, Any] = {}
        self.engine = f"matrix products alone, torch {version('torch')}"
        self.max_tokens = _NO_LIMIT
        self.model_bytes = _weights_bytes(files)

    def run(self, texts: Sequence[str]) -> tuple[Vectors, Steps]:
        tokens, _ = self.count(texts)
        if tokens not in self._fastest:
            self._fastest[tokens] = min(self._products, key=lambda product: _seconds(product, texts))
        clock = _Clock()
        vectors: Vectors = self._fastest[tokens].encode(texts)
        return vectors, (0.0, clock.lap(), 0.0)

    def count(self, texts: Sequence[str]) -> tuple[int, int]:
        tokens = int(self._products[0].count(texts))
        return tokens, tokens


class TransformersRunner:
    """The model by `transformers` alone: its tokenizer with padding, its forward pass, mean or CLS pooling by hand."""

    def __init__(self, files: ModelFiles, host: Host) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(host.threads)
        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(files.folder, local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(files.folder, local_files_only=True, dtype=torch.float32).eval()
        self._pooling = _pooling(files.folder)
        self.max_tokens = _max_tokens(files.folder, self._model.config.max_position_embeddings)
        self.engine = f"transformers {version('transformers')}, torch {version('torch')}"
        self.model_bytes = _weights_bytes(files)

    def run(self, texts: Sequence[str]) -> tuple[Vectors, Steps]:
        clock = _Clock()
        inputs = self._tokenize(texts)
        pre = clock.lap()
        with self._torch.inference_mode():
            hidden = self._model(**inputs).last_hidden_state
            predict = clock.lap()
            if self._pooling == "cls":
                pooled = hidden[:, 0]
            else:
                mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
                pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            vectors = self._torch.nn.functional.normalize(pooled, p=2, dim=1).numpy()
        return vectors, (pre, predict, clock.lap())

    def count(self, texts: Sequence[str]) -> tuple[int, int]:
        mask = self._tokenize(texts)["attention_mask"]
        return int(mask.sum()), mask.numel()

    def _tokenize(self, texts: Sequence[str]) -> Any:
        return self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )


class SentenceTransformersRunner:
    """`SentenceTransformer.encode` on torch, a request as one batch; it does not show its steps."""

    def __init__(self, files: ModelFiles, host: Host) -> None:
        import torch

        from embedctl_workers.backends.torch.loading import load_sentence_transformer

        torch.set_num_threads(host.threads)
        self._model = load_sentence_transformer(files)
        self.max_tokens = int(self._model.max_seq_length or 0)
        self.engine = f"sentence-transformers {version('sentence-transformers')}, torch {version('torch')}"
        self.model_bytes = _weights_bytes(files)

    def run(self, texts: Sequence[str]) -> tuple[Vectors, Steps]:
        vectors = self._model.encode(
            list(texts), batch_size=len(texts), show_progress_bar=False, normalize_embeddings=True
        )
        return np.asarray(vectors, np.float32), UNSHOWN

    def count(self, texts: Sequence[str]) -> tuple[int, int]:
        mask: Any = self._model.preprocess(list(texts))["attention_mask"]
        lengths: Rows = mask.sum(dim=1).numpy()
        return int(lengths.sum()), padded(lengths)


def _seconds(product: FloorAdapter, texts: Sequence[str]) -> float:
    """Time of the floor's products for these texts, in the second run; the first warms up."""
    product.encode(texts)
    clock = _Clock()
    product.encode(texts)
    return clock.lap()


class InOrder:
    """A lock that admits threads in order of arrival; a plain lock may starve some of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._came = self._gone = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the threads that came before."""
        with self._changed:
            place = self._came
            self._came += 1
            self._changed.wait_for(lambda: self._gone == place)
        try:
            yield
        finally:
            with self._changed:
                self._gone += 1
                self._changed.notify_all()


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def _graph_bytes(hardware: HardwareClass, files: ModelFiles, host: Host) -> int:
    """Size of the graph that a backend runs; 0 if it runs the model's own weights."""
    from embedctl_workers.backends.onnx.recipe import KINDS, wanted

    if hardware.backend not in KINDS:
        return 0
    artifact = ArtifactStore(host.cache).find(wanted(files, hardware.backend))
    stored = artifact.manifest["files"] if artifact else {}
    return sum(facts["size"] for name, facts in stored.items() if name not in _NO_GRAPH)


def _weights_bytes(files: ModelFiles) -> int:
    kept = sorted(files.folder.glob("model*.safetensors")) or sorted(files.folder.glob("pytorch_model*.bin"))
    return sum(path.stat().st_size for path in kept)


def _pooling(folder: Path) -> str:
    """`mean` or `cls`, as the model's folder says; `mean` if it says nothing.

    Raises:
        ModelError: it is pooled in another way.
    """
    path = folder / "1_Pooling" / "config.json"
    facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"pooling_mode": "mean"}
    modes = [name for name in ("cls_token", "mean_tokens") if facts.get(f"pooling_mode_{name}")]
    mode = facts.get("pooling_mode") or (modes[0].partition("_")[0] if len(modes) == 1 else "")
    if mode not in ("cls", "mean"):
        raise ModelError(f"{path} asks for a pooling other than mean and cls, and this system knows only these two")
    return str(mode)


def _max_tokens(folder: Path, positions: int) -> int:
    path = folder / "sentence_bert_config.json"
    facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return int(facts.get("max_seq_length") or positions)

"""sentence-transformers models on a GPU, by torch: CUDA and ROCm; in the type of 16 bits that the gate takes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_config.outputs import Output
from embedctl_workers.arrays.batching import batches_of
from embedctl_workers.arrays.distance import measure
from embedctl_workers.arrays.outputs import computed_of, finished, nothing, side_by_side
from embedctl_workers.arrays.tokens import Found, Rows, Tokens
from embedctl_workers.backends.base import run_warm_up_batches
from embedctl_workers.backends.gpu.attention import avoid_cudnn
from embedctl_workers.backends.gpu.device import SAMPLE_TOKENS, Gpu, affordable, most_tokens, open_gpu, watched
from embedctl_workers.backends.gpu.packed import PackedGpuEngine
from embedctl_workers.backends.gpu.padded import PaddedGpuEngine, keeps_fp32
from embedctl_workers.backends.gpu.transfer import Arriving, Transfer
from embedctl_workers.backends.torch.backend import SentenceModel
from embedctl_workers.backends.torch.packed.heads import Head, as_they_are, unused_of
from embedctl_workers.backends.torch.packed.packable import heads_of, packable
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, resolve_model
from embedctl_workers.models.gate_texts import gate_texts
from embedctl_workers.models.references import references_for
from embedctl_workers.redaction import first_line

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
log = logging.getLogger(__name__)

#: A model on the device: its layers, and the modules that turn tokens' vectors into a text's vector.
GpuEngine = PackedGpuEngine | PaddedGpuEngine

#: The longest text that memory is measured with (tokens): longer texts take little more memory per token.
_SAMPLE_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Choice:
    """The type to compute in, and why, in words."""

    dtype: torch.dtype
    why: str


def choose(candidates: Sequence[torch.dtype], references: Found, encode: Callable[[torch.dtype], Found]) -> Choice:
    """The candidate whose vectors are nearest to the references, those of torch in float32, texts × dim.

    The first one wins a tie; `encode` computes vectors of the same texts in a type. A ModelError if no candidate gives
    finite ones.
    """
    errors = {dtype: _error(dtype, references, encode) for dtype in candidates}
    best = min(errors, key=lambda dtype: errors[dtype])
    if not math.isfinite(errors[best]):
        raise ModelError("the model can't be computed in 16 bits here: set the class's option dtype to fp32")
    others = [f"{_NAMES[dtype]} {_in_words(error)}" for dtype, error in errors.items() if dtype != best]
    return Choice(best, f"{_NAMES[best]} (off by {_in_words(errors[best])}{''.join(f', {each}' for each in others)})")


def forced(dtype: str) -> Choice:
    return Choice(DTYPES[dtype], dtype)


def full_precision() -> None:
    """Turn off TF32 and partial sums in 16 bits: float32 keeps its precision, and sums of products are rounded once."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _error(dtype: torch.dtype, references: Found, encode: Callable[[torch.dtype], Found]) -> float:
    """The largest difference of a component, for vectors of unit length; infinite if it can't be computed."""
    try:
        error = measure(*side_by_side(encode(dtype), references)).max_abs_error
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as failed:
        log.warning("%s does not run here: %s", _NAMES[dtype], first_line(failed))
        return math.inf
    return error if math.isfinite(error) else math.inf


def _in_words(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "not finite"


class TorchGpuBackend(SentenceModel):
    """A sentence-transformers model on the one GPU that this process sees.

    Models of the BERT family run on packed tokens. All others run through their own modules, on padded batches. Either
    way, pooling and everything after it run in float32.

    Options:
        dtype: `auto` for fp16 or bf16, the one nearer to fp32 on the gate's texts; or `fp16`, `bf16`, `fp32`.
        engine: `auto`, or `padded` to run any model through its own modules.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("dtype", "engine")

    def __init__(
        self, files: ModelFiles, host: Host, device: Gpu, *, dtype: str = "auto", engine: str = "auto"
    ) -> None:
        _check_options(dtype, engine)
        torch.set_num_threads(host.threads)
        full_precision()
        avoid_cudnn()
        super().__init__(files, host)
        self.ahead = 2
        self._name, self._sharing = files.name, host.sharing
        self._device = device
        self._transfer = Transfer(device)
        self._packs = engine == "auto" and packable(self._model) is not None
        self._heads = self._heads_for(files, heads_of(self._model) if self._packs else None)
        self._unused = unused_of(self._heads)
        with self._within_memory():
            choice = self._nearest(files, host) if dtype == "auto" else forced(dtype)
            self._engine = self._engine_in(choice.dtype)
            #: runs the queries that the other one does not
            self._aside: GpuEngine | None = None
            if self._packs and self._late is not None and not self._late.attends:
                self._aside = self._padded_in(choice.dtype, as_they_are(self.widths))
        self.budget_by_sum = isinstance(self._engine, PackedGpuEngine)
        self.joins = self.budget_by_sum
        width, logits = max(self.dim, self.widths.get(Output.MULTI, 0)), self.outputs == (Output.SPARSE,)
        self._most_tokens = self.token_budget = most_tokens(width, packed=self.budget_by_sum, logits=logits)
        if self.budget_by_sum:
            self._tokenize = self._tokenize.only("input_ids")
        for parameter in self._model[0].parameters():
            parameter.data = torch.empty(0)  # the device has them
        self.engine = f"torch {torch.__version__.partition('+')[0]}, {choice.why}, {self._engine.name}"

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        """As :meth:`~embedctl_workers.backends.base.Backend.load`.

        A model of a kind that this backend does not support, or that does not fit into the GPU's memory, is a
        ModelError, and no GPU that torch can use a WorkerError.
        """
        return cls(resolve_model(model, entry, plain=False), host, open_gpu(host.sharing), **options)

    def forward(self, tokens: Tokens, rows: Rows) -> Arriving:
        try:
            with watched(self._device):
                return self._begin(self._engine_for(tokens), tokens, rows)
        except torch.OutOfMemoryError as error:
            log.info("a batch did not fit the device's memory: once more, alone: %s", first_line(error))
        # Memory was held by batches in flight, or in pieces: that says nothing of the size of a batch.
        with watched(self._device):
            self._device.synchronize()
            self._device.empty_cache()
            return self._begin(self._engine_for(tokens), tokens, rows)

    def forward_wider(self, tokens: Tokens, rows: Rows) -> Arriving:
        """As :meth:`forward`, in float32."""
        with watched(self._device):
            # On the stream that uses it, because nothing else waits for it.
            with torch.no_grad(), self._transfer.computing():
                engine = self._engine_for(tokens).widened()
            return self._begin(engine, tokens, rows)

    def finish(self, output: Arriving, *, normalize: bool) -> Found:
        with watched(self._device):
            found = output.wait()
        return finished(computed_of(found, output.tokens, output.rows, self._unused), normalize=normalize)

    def positions(self, lengths: Rows) -> int:
        return self._engine.positions(lengths)

    def warm_up(self) -> None:
        """Run batches of several lengths, and measure the memory per token."""
        with self._within_memory():
            run_warm_up_batches(self)
            with self._device.peak_of() as peak:
                positions = self._run_dummies(_SAMPLE_LENGTH, tokens=SAMPLE_TOKENS)
            free = self._device.free_memory()
            if free <= 0:
                raise torch.OutOfMemoryError("nothing is left for a batch")
            self.token_budget = affordable(peak.bytes, positions, free, self._most_tokens)

    def warm_up_thread(self) -> None:
        """Run small batches: the libraries of matrix products keep a handle and scratch memory for each thread."""
        run_warm_up_batches(self)

    def close(self) -> None:
        del self._engine, self._aside, self._model
        self._device.empty_cache()

    def _begin(self, engine: GpuEngine, tokens: Tokens, rows: Rows) -> Arriving:
        with torch.inference_mode():
            batch = engine.batch(tokens, rows)
            inputs = self._transfer.upload(batch.arrays)
            with self._transfer.computing():
                found = engine.run(inputs, batch.facts)
            return self._transfer.download(found, tokens, rows)

    def _nearest(self, files: ModelFiles, host: Host) -> Choice:
        """The 16-bit type whose vectors of the gate's texts are nearest to those of float32."""
        texts, references = self.tokenize(gate_texts(), None), references_for(files, host)[self.outputs[0]][0]

        def encode(dtype: torch.dtype) -> Found:
            engine = self._engine_in(dtype)
            found = nothing(len(texts.lengths), texts.outputs, self.dim)
            for rows in batches_of(texts.lengths, SAMPLE_TOKENS):
                found[rows] = self.finish(self._begin(engine, texts, rows), normalize=not self.dim)
            return found if self.dim else found[:, 0]

        # In fp16, some of these models clamp what overflows (transformers' modeling_t5.py): a wrong vector is finite.
        dtypes = self._device.dtypes
        if keeps_fp32(self._model[0]):
            dtypes = tuple(each for each in dtypes if each != torch.float16) or (torch.float32,)
        return choose(dtypes, references, encode)

    def _engine_in(self, dtype: torch.dtype) -> GpuEngine:
        if not self._packs or (found := packable(self._model)) is None:
            return self._padded_in(dtype, self._heads)
        weights, rest = found
        modules = [module.to(self._device.device) for module in rest]
        engine = PackedGpuEngine(weights, modules, self._heads, self._device, dtype)
        # The weights were copied on another stream than the computing one.
        self._device.synchronize()
        return engine

    def _padded_in(self, dtype: torch.dtype, heads: Mapping[Output, Head]) -> PaddedGpuEngine:
        engine = PaddedGpuEngine(self._model, heads, self._device.device, dtype, self.max_tokens)
        self._device.synchronize()
        return engine

    def _engine_for(self, tokens: Tokens) -> GpuEngine:
        return self._aside if self._aside is not None and "attention_mask" in tokens.columns else self._engine

    def _run_dummies(self, length: int, *, tokens: int) -> int:
        """Encode about `tokens` tokens, in texts of about `length` tokens; the number of tokens that were computed."""
        text = self.tokenize(["a " * min(length, self.max_tokens)], "")
        rows = np.zeros(max(1, tokens // int(text.lengths[0])), np.int64)
        self.finish(self.forward(text, rows), normalize=True)
        return self.positions(text.lengths[rows])

    @contextmanager
    def _within_memory(self) -> Iterator[None]:
        """Turn a lack of memory before the first batch into a ModelError that explains it."""
        try:
            with watched(self._device):
                yield
        except torch.OutOfMemoryError as error:
            several = self._sharing > 1
            place = f"a part of 1/{self._sharing} of the memory" if several else "the free memory"
            hint = ". Set a lower workers_per_device or --gpu-workers, so that fewer share it" if several else ""
            raise ModelError(
                f"model {self._name!r} does not fit into {place} of {self._device.name}: {first_line(error)}{hint}"
            ) from error


def _check_options(dtype: object, engine: object) -> None:
    if dtype not in ("auto", *DTYPES):
        raise SettingsError(f"dtype {dtype!r} of backend torch-gpu is none of auto, {', '.join(DTYPES)}")
    if engine not in ("auto", "padded"):
        raise SettingsError(f"engine {engine!r} of backend torch-gpu is neither auto nor padded")

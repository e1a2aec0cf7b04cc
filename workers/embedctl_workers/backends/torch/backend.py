"""sentence-transformers on torch: the reference that every other backend is measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import torch
from sentence_transformers import SentenceTransformer

from embedctl_config.cpu import no_bf16
from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.padding import Padding
from embedctl_workers.arrays.tokenizing import TextTokenizer
from embedctl_workers.arrays.tokens import Rows, Side, Tokens, Vectors, padded
from embedctl_workers.backends.base import Backend, Reference
from embedctl_workers.backends.torch.loading import fast_tokenizer, load_sentence_transformer
from embedctl_workers.backends.torch.packed.choosing import bf16_layers, fp32_layers
from embedctl_workers.backends.torch.packed.engine import PackedEngine, packed_engine
from embedctl_workers.machine.host import Host
from embedctl_workers.machine.teams import OwnPlace
from embedctl_workers.models.files import ModelFiles, resolve_model
from embedctl_workers.models.longest import longest_text
from embedctl_workers.models.tuning import PADDED_BATCH_COST
from embedctl_workers.models.wordpiece.load import fast_tokenizer_for

#: Number of prompts whose length in tokens is cached.
_PROMPTS_KEPT = 16

#: Runs a model on some of the texts: rows × dim, not normalised unless the model itself does so.
CpuEngine = Callable[[Tokens, Rows], torch.Tensor]


class SentenceModel(Backend):
    """A sentence-transformers model in fp32 on the CPU, and its tokenizer: the base of the backends that run on torch.

    Texts are tokenised once, unpadded. A ModelError if it can't be loaded, or is no text model with a fast tokenizer.
    """

    def __init__(self, files: ModelFiles, host: Host) -> None:
        self.fingerprint = files.fingerprint
        self.reference = Reference(files)
        self._model = load_sentence_transformer(files)
        self._tokenizer = tokenizer = fast_tokenizer(self._model, files)
        dim = self._model.get_embedding_dimension()
        if dim is None:
            raise ModelError(f"model {files.name!r} does not state the dimension of its vectors")
        self.dim = dim
        self.max_tokens = longest_text(self._model)
        self._tokenize = TextTokenizer(
            tokenizer.backend_tokenizer,
            max_tokens=self.max_tokens,
            columns=[name for name in tokenizer.model_input_names if name != "attention_mask"],
            keep="left" if tokenizer.truncation_side == "right" else "right",
            fast=fast_tokenizer_for(tokenizer.backend_tokenizer, host),
        )
        # The chunks of a job follow each other with the same prompt, which may be long: a few lengths are cached.
        self._prompt_tokens = lru_cache(maxsize=_PROMPTS_KEPT)(self._count_prompt_tokens)

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        if prompt is None and self._model.default_prompt_name is not None:
            prompt = self._model.prompts.get(self._model.default_prompt_name)
        if not prompt:
            return self._tokenize(texts, truncation_side)
        tokens = self._tokenize([prompt + text for text in texts], truncation_side)
        return replace(tokens, prompt_tokens=self._prompt_tokens(prompt))

    def _count_prompt_tokens(self, prompt: str) -> int | None:
        """The number of tokens that pooling leaves out, as the model itself counts; None if it leaves out none."""
        length: Any = self._model.preprocess(["a"], prompt=prompt).get("prompt_length")
        for module in self._model:  # sentence-transformers also caches every prompt, without a bound
            getattr(module, "_prompt_length_mapping", {}).clear()
        return None if length is None else int(length)


class TorchBackend(SentenceModel):
    """A sentence-transformers model in fp32 on the CPU.

    Models of the BERT family run on packed tokens. For all others, each batch is padded to its own longest row, and the
    model's own modules do everything after tokenising. Either way, the vectors are those of
    `SentenceTransformer.encode`.

    Options:
        engine: `auto`, or `padded` to run any model through its own modules.
        products: of packed models: `auto`, or `plain` for torch's matrix products wherever another unit would compute
            them.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("engine", "products")

    def __init__(self, files: ModelFiles, host: Host, engine: str = "auto", products: str = "auto") -> None:
        for name, value, other in (("engine", engine, "padded"), ("products", products, "plain")):
            if value not in ("auto", other):
                raise SettingsError(f"{name} {value!r} of backend torch is neither auto nor {other}")
        torch.set_num_threads(host.threads)
        super().__init__(files, host)
        self._plain = products == "plain"
        self._place = OwnPlace()
        with self._place:  # it measures
            packed = self._packed(self._model, host) if engine == "auto" else None
        self._engine: CpuEngine = packed or self._padded(Padding.of(self._tokenizer))
        self.engine = packed.name if packed else self.PADDED
        self._pads = packed is None
        if packed:
            self._tokenize = self._tokenize.only("input_ids")
        self.batch_cost = PADDED_BATCH_COST if self._pads else None
        self.budget_by_sum = False  # packed rows too: budgets on CPUs are tuned as rows × longest row

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        return cls(resolve_model(model, entry), host, **options)

    #: The engine's name for a model that is run through its own modules.
    PADDED: ClassVar[str] = "padded, torch"

    def _packed(self, model: SentenceTransformer, host: Host) -> PackedEngine | None:
        """The engine for packed tokens; None if it can't run this model."""
        return packed_engine(model, host, partial(fp32_layers, plain=self._plain))

    def _padded(self, padding: Padding) -> CpuEngine:
        return _Padded(self._model, padding)

    def forward(self, tokens: Tokens, rows: Rows) -> torch.Tensor:
        with torch.inference_mode(), self._place:
            return self._engine(tokens, rows)

    def finish(self, output: torch.Tensor, *, normalize: bool) -> Vectors:
        with torch.inference_mode():
            vectors = output.float()
            if normalize:
                vectors = torch.nn.functional.normalize(vectors, p=2, dim=1)
            return vectors.numpy(force=True)

    def positions(self, lengths: Rows) -> int:
        return padded(lengths) if self._pads else int(lengths.sum())

    def close(self) -> None:
        del self._engine, self._model


class TorchBf16Backend(TorchBackend):
    """The same with matrix products in bf16, on CPUs that have instructions for them (else a ModelError); sums in fp32.

    Models of the BERT family also keep LayerNorm, GELU and softmax in fp32; others compute as torch's autocast does.
    """

    PADDED: ClassVar[str] = "padded, torch bf16"

    def __init__(self, files: ModelFiles, host: Host, engine: str = "auto", products: str = "auto") -> None:
        if why := no_bf16():
            raise ModelError(why)
        super().__init__(files, host, engine, products)

    def _packed(self, model: SentenceTransformer, host: Host) -> PackedEngine | None:
        return packed_engine(model, host, partial(bf16_layers, plain=self._plain))

    def _padded(self, padding: Padding) -> CpuEngine:
        engine = _Padded(self._model, padding)

        def run(tokens: Tokens, rows: Rows) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return engine(tokens, rows).float()

        return run


class _Padded:
    """Runs any model through its own modules, on batches padded to their longest row."""

    def __init__(self, model: SentenceTransformer, padding: Padding) -> None:
        self._model = model
        self._padding = padding

    def __call__(self, tokens: Tokens, rows: Rows) -> torch.Tensor:
        columns = self._padding(tokens, rows, int(tokens.lengths[rows].max()))
        features: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
        features["modality"] = "text"
        if tokens.prompt_tokens is not None:
            features["prompt_length"] = tokens.prompt_tokens
        output: torch.Tensor = self._model(features)["sentence_embedding"]
        return output

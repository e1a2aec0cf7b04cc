"""sentence-transformers on torch: the reference that every other backend is measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tokenizers import Tokenizer

from embedctl_config.cpu import no_bf16
from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_config.outputs import PLAIN, Output
from embedctl_workers.arrays.late import LateRules, LateTexts
from embedctl_workers.arrays.outputs import Column, Computed, TokenVectors, cells_of_weights, finished
from embedctl_workers.arrays.padding import Padding, used_places
from embedctl_workers.arrays.tokenizing import TextTokenizer
from embedctl_workers.arrays.tokens import SCORED, Found, Rows, Side, Tokens, Vectors, padded
from embedctl_workers.backends.base import Backend, Reference, run_warm_up_batches
from embedctl_workers.backends.torch.kept import PackedModel, TextRules, keep_model, kept_model
from embedctl_workers.backends.torch.packed.choosing import Chooser, plain_layers
from embedctl_workers.backends.torch.packed.engine import PackedEngine
from embedctl_workers.backends.torch.packed.kernels import Kernels, load_kernels
from embedctl_workers.backends.torch.packed.layers import LayerKind
from embedctl_workers.backends.torch.packed.modules import in_turn
from embedctl_workers.backends.torch.packed.weights import Weights
from embedctl_workers.machine.host import Host
from embedctl_workers.machine.teams import OwnPlace, set_threads
from embedctl_workers.models.facts import longest_text
from embedctl_workers.models.files import ModelFiles, resolve_model
from embedctl_workers.models.tuning import PADDED_BATCH_COST
from embedctl_workers.models.wordpiece.load import fast_tokenizer_for

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedTokenizerFast

    from embedctl_workers.backends.torch.packed.heads import Head

#: Number of prompts whose length in tokens is cached.
_PROMPTS_KEPT = 16

#: Runs a model on some of the texts.
CpuEngine = Callable[[Tokens, Rows], Computed]


class SentenceModel(Backend):
    """A sentence-transformers model in fp32 on the CPU, and its tokenizer: the base of the backends that run on torch.

    Texts are tokenised once, unpadded. A ModelError if it can't be loaded, or is no text model with a fast tokenizer.
    """

    _model: SentenceTransformer
    _tokenizer: PreTrainedTokenizerFast
    #: What tokenises the texts of a model of late interaction.
    _late: LateTexts | None = None

    def __init__(self, files: ModelFiles, host: Host) -> None:
        self.fingerprint = files.fingerprint
        self.reference = Reference(files)
        # The chunks of a job follow each other with the same prompt, which may be long: a few lengths are cached.
        self._prompt_tokens: Callable[[str], int | None] = lru_cache(maxsize=_PROMPTS_KEPT)(self._count_prompt_tokens)
        rules = self._load(files, host)
        self.dim, self.max_tokens, self._prompt = rules.dim, rules.max_tokens, rules.prompt
        self._rules = rules
        tokenizer = Tokenizer.from_str(rules.tokenizer)
        if rules.late is not None:
            self._late = LateTexts(rules.late, tokenizer, rules.columns, rules.keep)
            self.own_prompts, self.max_tokens = self._late.prompts, rules.late.longest_document
        self._tokenize = TextTokenizer(
            tokenizer,
            max_tokens=rules.max_tokens,
            columns=rules.columns,
            keep=rules.keep,
            fast=fast_tokenizer_for(tokenizer, host),
        )

    def _load(self, files: ModelFiles, host: Host) -> TextRules:
        from embedctl_workers.backends.torch.loading import fast_tokenizer, load_sentence_transformer

        self._model = model = load_sentence_transformer(files)
        self._tokenizer = tokenizer = fast_tokenizer(model, files)
        first: Any = model[0]
        of_words = files.outputs == (Output.SPARSE,)
        width = first.auto_model.config.vocab_size if of_words else model.get_embedding_dimension()
        if width is None:
            raise ModelError(f"model {files.name!r} does not state the dimension of its vectors")
        longest = longest_text(model)
        return TextRules(
            tokenizer=tokenizer.backend_tokenizer.to_str(),
            columns=[name for name in tokenizer.model_input_names if name != "attention_mask"],
            keep="left" if tokenizer.truncation_side == "right" else "right",
            max_tokens=longest,
            dim=width if Output.DENSE in files.outputs else 0,
            prompt=model.prompts.get(model.default_prompt_name or "") or "",
            width=0 if Output.DENSE in files.outputs else width,
            late=LateRules.of(model, longest) if files.outputs == (Output.MULTI,) else None,
        )

    def _heads_for(self, files: ModelFiles, own: Mapping[Output, Any] | None) -> Mapping[Output, Any]:
        """Say what the model gives; the heads that make it of packed states, or of what its own modules make.

        `own` are the heads of a packed model without dense vectors; None: its own modules do all.
        """
        self.outputs = files.outputs
        if files.outputs == PLAIN:
            return {}
        if Output.DENSE in files.outputs:
            from embedctl_workers.backends.torch.packed.heads import heads_beside

            heads = heads_beside(files, Tokenizer.from_str(self._rules.tokenizer))
            self.widths = {output: head.width for output, head in heads.items()}
            return heads
        self.widths = {files.outputs[0]: self._rules.width}
        self._prompt_tokens = _left_out
        if own is None:
            from embedctl_workers.backends.torch.packed.heads import as_they_are

            return as_they_are(self.widths)
        return own

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        outputs = PLAIN if Output.DENSE in self.outputs else self.outputs
        if self._late is not None:
            return replace(self._late(texts, prompt, truncation_side), outputs=outputs)
        prompt = self._prompt if prompt is None else prompt
        tokens = self._tokenize([prompt + text for text in texts] if prompt else texts, truncation_side)
        return replace(tokens, prompt_tokens=self._prompt_tokens(prompt) if prompt else None, outputs=outputs)

    def _count_prompt_tokens(self, prompt: str) -> int | None:
        """The number of tokens that pooling leaves out, as the model itself counts; None if it leaves out none."""
        length: Any = self._model.preprocess(["a"], prompt=prompt).get("prompt_length")
        for module in self._model:  # sentence-transformers also caches every prompt, without a bound
            getattr(module, "_prompt_length_mapping", {}).clear()
        return None if length is None else int(length)


class TorchBackend(SentenceModel):
    """A sentence-transformers model in fp32 on the CPU.

    Models of the BERT family run on packed tokens; most of them are loaded without sentence-transformers from their
    second start on. For all others, each batch is padded to its own longest row, and the model's own modules do
    everything after tokenising. Either way, the vectors are those of `SentenceTransformer.encode`.

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
        self._threads = host.threads
        self._may_pack, self._plain = engine == "auto", products == "plain"
        self._place = OwnPlace()
        self._packed: PackedModel | None = None
        super().__init__(files, host)
        packed = self._packed
        self._heads = self._heads_for(files, None if packed is None else packed.heads)
        #: the weights for queries whose tokens do not attend to all others
        self._spare: Weights | None = None
        if packed is not None and self._late is not None and not self._late.attends:
            self._spare = replace(packed.weights, layers=[*packed.weights.layers])
        self._engine: CpuEngine
        self._pads = packed is None
        if packed is None:
            self.engine = self.PADDED
            self._engine = self._padded(Padding.of(self._tokenizer))
        else:
            kernels = load_kernels(host)
            with self._place:  # it measures
                kind = self._layers(packed.weights, kernels, host)
                self._engine = engine = PackedEngine(packed.weights, packed.rest, kernels, kind)
            engine.heads = self._heads
            self.engine, self.chosen = engine.name, kind.chosen
            self._tokenize = self._tokenize.only("input_ids")
        self.batch_cost = PADDED_BATCH_COST if self._pads else None
        self.budget_by_sum = False  # packed rows too: budgets on CPUs are tuned as rows × longest row

    def _load(self, files: ModelFiles, host: Host) -> TextRules:
        kept = kept_model(files, host) if self._may_pack else None
        if kept is None:
            from embedctl_workers.backends.torch.packed.packable import heads_of, packable, rest_of, take_layers

            rules = super()._load(files, host)
            if not self._may_pack or (packed := packable(self._model)) is None:
                return rules
            kept = keep_model(files, host, self._model, rules, packed)
            if kept is None:
                self._packed = PackedModel(rules, packed[0], rest_of(packed[1]), heads_of(self._model))
                take_layers(self._model, packed[0])
                return rules
            del self._model, self._tokenizer
        self._packed = kept
        self._prompt_tokens = _left_out
        return kept.rules

    @cached_property
    def _queries(self) -> CpuEngine:
        """What runs queries whose tokens do not attend to all others, in fp32."""
        from embedctl_workers.backends.torch.packed.torch_kernels import TorchKernels

        assert self._spare is not None
        kernels = TorchKernels()
        engine = PackedEngine(self._spare, in_turn([]), kernels, plain_layers("BLAS", kernels))
        engine.heads = self._heads
        return engine

    @classmethod
    def load(cls, model: str, entry: ModelEntry | None, host: Host, options: Mapping[str, Any]) -> Self:
        return cls(resolve_model(model, entry, plain=False), host, **options)

    #: The engine's name for a model that is run through its own modules.
    PADDED: ClassVar[str] = "padded, torch"

    def _layers(self, weights: Weights, kernels: Kernels, host: Host) -> LayerKind:
        """How the layers of a packed model are computed."""
        return Chooser(weights, kernels, host).fp32(plain=self._plain)

    def _padded(self, padding: Padding) -> CpuEngine:
        return _Padded(self._model, padding, self._heads)

    def forward(self, tokens: Tokens, rows: Rows) -> Computed:
        aside = self._spare is not None and "attention_mask" in tokens.columns
        set_threads(self._threads)
        with self._place:
            return (self._queries if aside else self._engine)(tokens, rows)

    def finish(self, output: Computed, *, normalize: bool) -> Found:
        return finished(output, normalize=normalize)

    def warm_up(self) -> None:
        run_warm_up_batches(self, [8])  # on CPUs, what is done once, such as starting threads, is so for any length

    def positions(self, lengths: Rows) -> int:
        return padded(lengths) if self._pads else int(lengths.sum())

    def close(self) -> None:
        del self._engine
        self.__dict__.pop("_model", None)


class TorchBf16Backend(TorchBackend):
    """The same with matrix products in bf16, on CPUs that have instructions for them (else a ModelError); sums in fp32.

    Models of the BERT family also keep LayerNorm, GELU and softmax in fp32; others compute as torch's autocast does.
    """

    PADDED: ClassVar[str] = "padded, torch bf16"

    def __init__(self, files: ModelFiles, host: Host, engine: str = "auto", products: str = "auto") -> None:
        if why := no_bf16():
            raise ModelError(why)
        super().__init__(files, host, engine, products)

    def _layers(self, weights: Weights, kernels: Kernels, host: Host) -> LayerKind:
        return Chooser(weights, kernels, host).bf16(plain=self._plain)

    def _padded(self, padding: Padding) -> CpuEngine:
        return _Padded(self._model, padding, self._heads, bf16=True)


def _left_out(_prompt: str) -> int | None:
    """The tokens of a prompt that the pooling of a kept model leaves out: none."""
    return None


class _Padded:
    """Runs any model through its own modules, on batches padded to their longest row. Heads take the vectors of tokens
    that come of these modules."""

    def __init__(self, model: Any, padding: Padding, heads: Mapping[Output, Head], *, bf16: bool = False) -> None:
        self._model = model
        self._padding = padding
        self._heads = heads
        self._bf16 = bf16

    def __call__(self, tokens: Tokens, rows: Rows) -> Computed:
        import torch

        width = int(tokens.lengths[rows].max())
        columns = self._padding(tokens, rows, width)
        columns.pop(SCORED, None)
        features: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
        features["modality"] = "text"
        if tokens.prompt_tokens is not None:
            features["prompt_length"] = tokens.prompt_tokens
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            found = self._model(features)
            if tokens.outputs == PLAIN:
                return _vectors(found["sentence_embedding"])
            computed: dict[Output, Vectors | Column | TokenVectors] = {}
            for output in tokens.outputs:
                if head := self._heads.get(output):
                    used = torch.from_numpy(used_places(tokens, rows, width))
                    computed[output] = head(_vectors(found["token_embeddings"][used]), tokens, rows)
                else:
                    whole = _vectors(found["sentence_embedding"])
                    computed[output] = cells_of_weights(whole) if output == Output.SPARSE else whole
            return computed


def _vectors(found: Any) -> Vectors:
    vectors: Vectors = found.float().numpy()
    return vectors

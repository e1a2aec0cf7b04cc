"""Small sentence-transformers models with random weights, made without a network: every architecture in a few KB.

Folders have the same layout as on the hub. Weights and biases are large, so that texts really differ and an engine that
leaves something out is noticed. The same :class:`Tiny` always gives the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

from embedctl_workers.models.files import ModelFiles
from tests.support.tiny_tokenizers import TOKENIZERS, Words

Family = Literal[
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "mpnet",
    "modernbert",
    "qwen2",
    "qwen3",
    "mistral",
    "nomic-bert",
    "gte",
    "gemma",
    "t5",
    "gpt2",
]
FAMILIES: tuple[Family, ...] = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "qwen2", "qwen3")


@dataclass(frozen=True)
class Tiny:
    """The properties of a small model.

    Attributes:
        pooling: a mode of sentence-transformers, or several joined by `+`.
        heads: `hidden` / `heads` is a head's size.
        positions: the longest text that the architecture takes, special tokens included.
        max_seq_length: of `sentence_bert_config.json`; left out where None.
        dense: size of a Dense module after pooling; none where 0.
        prompt: the model's default one.
        padding: the side that the tokenizer pads on; None means the family's default.
    """

    family: Family = "bert"
    pooling: str = "mean"
    normalize: bool = False
    hidden: int = 32
    heads: int = 2
    layers: int = 2
    act: str = "gelu"
    positions: int = 128
    max_seq_length: int | None = 32
    dense: int = 0
    prompt: str | None = None
    include_prompt: bool = True
    lower: bool = False
    padding: Literal["left", "right"] | None = None
    truncation: Literal["left", "right"] = "right"
    seed: int = 0

    def __str__(self) -> str:
        plain = asdict(Tiny())
        changes = [f"{name}={value}" for name, value in asdict(self).items() if value != plain[name]]
        return " ".join([self.family, *(change for change in changes if not change.startswith("family="))])


#: Makes a small model, once; its folder.
MakeModel = Callable[[Tiny], Path]
FilesOf = Callable[[Tiny], ModelFiles]


def make_model(folder: Path, tiny: Tiny) -> Path:
    """Write a model's folder, and return it."""
    words = TOKENIZERS[tiny.family](tiny.lower)
    config = _config(tiny, words)
    model = transformers.AutoModel.from_config(config)
    fill(model, tiny.seed)
    model.save_pretrained(folder)
    write_tokenizer(folder, tiny, words)
    _write_modules(folder, tiny)
    return folder


def make_tokenizer(tiny: Tiny) -> Tokenizer:
    """The tokenizer of such a model."""
    return TOKENIZERS[tiny.family](tiny.lower).tokenizer


def _config(tiny: Tiny, words: Words) -> Any:
    common: dict[str, Any] = {
        "vocab_size": words.tokenizer.get_vocab_size(),
        "pad_token_id": words.id_of("pad_token"),
        "bos_token_id": words.id_of("cls_token"),
        "eos_token_id": words.id_of("sep_token") or words.id_of("eos_token"),
    }
    sizes: dict[str, Any] = {
        "hidden_size": tiny.hidden,
        "num_attention_heads": tiny.heads,
        "num_hidden_layers": tiny.layers,
        "intermediate_size": 2 * tiny.hidden + 8,
    }
    form: Any  # the signatures lack what these classes take by keyword
    match tiny.family:
        case "bert" | "roberta" | "xlm-roberta" | "mpnet":
            form = {
                "bert": transformers.BertConfig,
                "roberta": transformers.RobertaConfig,
                "xlm-roberta": transformers.XLMRobertaConfig,
                "mpnet": transformers.MPNetConfig,
            }[tiny.family]
            # But for BERT, positions begin after the padding's position.
            positions = tiny.positions + (0 if tiny.family == "bert" else 2)
            return form(**common, **sizes, hidden_act=tiny.act, max_position_embeddings=positions)
        case "distilbert":
            return transformers.DistilBertConfig(
                **common,
                dim=tiny.hidden,
                n_heads=tiny.heads,
                n_layers=tiny.layers,
                hidden_dim=2 * tiny.hidden + 8,
                activation=tiny.act,
                max_position_embeddings=tiny.positions,
            )
        case "modernbert":
            form = transformers.ModernBertConfig
            return form(
                **common,
                **sizes,
                cls_token_id=common["bos_token_id"],
                sep_token_id=common["eos_token_id"],
                hidden_activation=tiny.act,
                max_position_embeddings=tiny.positions,
                global_attn_every_n_layers=2,
                local_attention=6,
            )
        case "qwen2" | "qwen3" | "mistral":
            form = {
                "qwen2": transformers.Qwen2Config,
                "qwen3": transformers.Qwen3Config,
                "mistral": transformers.MistralConfig,
            }[tiny.family]
            return form(
                **common,
                **sizes,
                head_dim=tiny.hidden // tiny.heads,
                num_key_value_heads=max(1, tiny.heads // 2),
                max_position_embeddings=tiny.positions,
            )
        case "nomic-bert" | "gte":
            form = transformers.NomicBertConfig if tiny.family == "nomic-bert" else transformers.GteConfig
            return form(**common, **sizes, max_position_embeddings=tiny.positions)
        case "gemma":
            return transformers.Gemma3TextConfig(
                **{**common, "bos_token_id": words.id_of("bos_token")},
                **sizes,
                head_dim=tiny.hidden // tiny.heads,
                num_key_value_heads=max(1, tiny.heads // 2),
                query_pre_attn_scalar=tiny.hidden // tiny.heads,
                max_position_embeddings=tiny.positions,
                layer_types=["sliding_attention", "full_attention"] * (tiny.layers // 2),
                sliding_window=8,
                use_bidirectional_attention=True,
            )
        case "gpt2":
            return transformers.GPT2Config(
                **common,
                n_embd=tiny.hidden,
                n_head=tiny.heads,
                n_layer=tiny.layers,
                n_inner=2 * tiny.hidden + 8,
                n_positions=tiny.positions,
            )
        case "t5":
            form = transformers.T5Config
            return form(
                **common,
                d_model=tiny.hidden,
                d_kv=tiny.hidden // tiny.heads,
                d_ff=2 * tiny.hidden + 8,
                num_layers=tiny.layers,
                num_heads=tiny.heads,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=20,
                decoder_start_token_id=common["pad_token_id"],
            )


def fill(model: Any, seed: int) -> None:
    """Fill the model with random weights, scaled so that every layer's output is about as large as its input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in sorted(model.named_parameters()):
            noise = torch.randn(values.shape, generator=generator)
            if name.endswith("Attention.q.weight"):  # T5 has the scale of its scores in this weight
                noise /= model.config.d_kv**0.5
            if values.dim() > 1:
                values.copy_(noise if "embed" in name else 1.5 * noise / values.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                values.copy_(0.3 * noise)
            else:
                values.copy_(1 + 0.2 * noise)


def write_tokenizer(folder: Path, tiny: Tiny, words: Words) -> None:
    """Write the files of a tokenizer."""
    words.tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "special_tokens_map.json", words.special)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": words.tokenizer_class,
            **({} if tiny.family == "t5" else {"model_max_length": tiny.positions}),
            "model_input_names": words.inputs,
            "padding_side": tiny.padding or words.padding_side,
            "truncation_side": tiny.truncation,
            "clean_up_tokenization_spaces": False,
            **({"do_lower_case": tiny.lower} if words.tokenizer_class.startswith(("Bert", "Distil", "MPNet")) else {}),
            **words.special,
        },
    )


def _write_modules(folder: Path, tiny: Tiny) -> None:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if tiny.max_seq_length is not None:
        write_json(
            folder / "sentence_bert_config.json", {"max_seq_length": tiny.max_seq_length, "do_lower_case": tiny.lower}
        )
    modes = tiny.pooling.split("+")
    names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens"}
    names |= {name: name for name in ("mean_sqrt_len_tokens", "lasttoken")}
    write_json(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": tiny.hidden,
            **{f"pooling_mode_{name}": mode in modes for mode, name in names.items()},
            "include_prompt": tiny.include_prompt,
        },
    )
    if tiny.dense:
        modules.append(("2_Dense", "Dense"))
        kind, config = dense(len(modes) * tiny.hidden, tiny.dense, "Tanh", bias=True)
        write_json(folder / "2_Dense" / "config.json", config)
        save_file(weights_of(kind, config, tiny.seed + 1), str(folder / "2_Dense" / "model.safetensors"))
    if tiny.normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    write_json(
        folder / "modules.json",
        [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (path, kind) in enumerate(modules)
        ],
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {} if tiny.prompt is None else {"passage": tiny.prompt},
            "default_prompt_name": None if tiny.prompt is None else "passage",
            "similarity_fn_name": "cosine",
        },
    )


def dense(into: int, out: int, activation: str = "Identity", *, bias: bool = False) -> tuple[str, dict[str, Any]]:
    """A Dense module."""
    name = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"
    return "Dense", {"in_features": into, "out_features": out, "bias": bias, "activation_function": name}


def weights_of(kind: str, config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The random weights of a module, by the names of its file; none for a kind that has none."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "Dense":
        into, out = config["in_features"], config["out_features"]
        weights = {"linear.weight": torch.randn(out, into, generator=generator) / into**0.5}
        return weights | ({"linear.bias": torch.randn(out, generator=generator)} if config["bias"] else {})
    if kind == "LayerNorm":
        size = config["dimension"]
        return {
            "norm.weight": 1 + 0.2 * torch.randn(size, generator=generator),
            "norm.bias": 0.3 * torch.randn(size, generator=generator),
        }
    if kind == "WeightedLayerPooling":
        layers = config["num_hidden_layers"] + 1 - config["layer_start"]
        return {"layer_weights": torch.rand(layers, generator=generator)}
    return {}


def write_json(path: Path, value: object) -> None:
    """Write a file of a model, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")

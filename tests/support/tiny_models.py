"""Small sentence-transformers models with random weights, made without a network: every architecture in a few KB.

Folders have the same layout as on the hub. Weights and biases are large, so that texts really differ and an engine that
leaves something out is noticed. The same :class:`Tiny` always gives the same files.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

Family = Literal["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "qwen2", "qwen3")

_WORDS = (
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "on",
    "text",
    "word",
    "query",
    "passage",
    "model",
)
_CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation + "äöüß日本語"
#: Word endings and parts, so that words of several pieces come up.
_PIECES = ("er", "ing", "ed", "ion", "th", "an", "re", "on")


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


class _Words(NamedTuple):
    """A family's tokenizer, and the special tokens that its configuration names."""

    tokenizer: Tokenizer
    special: Mapping[str, str]
    tokenizer_class: str
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    padding_side: Literal["left", "right"] = "right"

    def id_of(self, name: str) -> int | None:
        return self.tokenizer.token_to_id(self.special[name]) if name in self.special else None


def make_model(folder: Path, tiny: Tiny) -> Path:
    """Write a model's folder, and return it."""
    words = _TOKENIZERS[tiny.family](tiny)
    config = _config(tiny, words)
    model = transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]  # transformers' own
    _fill(model, tiny.seed)
    model.save_pretrained(folder)
    _write_tokenizer(folder, tiny, words)
    _write_modules(folder, tiny)
    return folder


def make_tokenizer(tiny: Tiny) -> Tokenizer:
    """The tokenizer of such a model."""
    return _TOKENIZERS[tiny.family](tiny).tokenizer


def _config(tiny: Tiny, words: _Words) -> Any:
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
        case "bert":
            return transformers.BertConfig(
                **common, **sizes, hidden_act=tiny.act, max_position_embeddings=tiny.positions
            )
        case "roberta" | "xlm-roberta" | "mpnet":
            # Positions begin after the padding's position.
            form = {
                "roberta": transformers.RobertaConfig,
                "xlm-roberta": transformers.XLMRobertaConfig,
                "mpnet": transformers.MPNetConfig,
            }[tiny.family]
            return form(**common, **sizes, hidden_act=tiny.act, max_position_embeddings=tiny.positions + 2)
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
        case "qwen2" | "qwen3":
            form = transformers.Qwen2Config if tiny.family == "qwen2" else transformers.Qwen3Config
            return form(
                **common,
                **sizes,
                head_dim=tiny.hidden // tiny.heads,
                num_key_value_heads=max(1, tiny.heads // 2),
                max_position_embeddings=tiny.positions,
            )


def _fill(model: torch.nn.Module, seed: int) -> None:
    """Fill the model with random weights, scaled so that every layer's output is about as large as its input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in sorted(model.named_parameters()):
            noise = torch.randn(values.shape, generator=generator)
            if values.dim() > 1:
                values.copy_(noise if "embed" in name else 1.5 * noise / values.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                values.copy_(0.3 * noise)
            else:
                values.copy_(1 + 0.2 * noise)


def _write_tokenizer(folder: Path, tiny: Tiny, words: _Words) -> None:
    words.tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "special_tokens_map.json", words.special)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": words.tokenizer_class,
            "model_max_length": tiny.positions,
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
        _write(
            folder / "sentence_bert_config.json", {"max_seq_length": tiny.max_seq_length, "do_lower_case": tiny.lower}
        )
    modes = tiny.pooling.split("+")
    names = {
        "cls": "cls_token",
        "mean": "mean_tokens",
        "max": "max_tokens",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    }
    names |= {"weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}
    _write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": tiny.hidden,
            **{f"pooling_mode_{name}": mode in modes for mode, name in names.items()},
            "include_prompt": tiny.include_prompt,
        },
    )
    if tiny.dense:
        modules.append(("2_Dense", "Dense"))
        _write_dense(folder / "2_Dense", len(modes) * tiny.hidden, tiny)
    if tiny.normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    _write(
        folder / "modules.json",
        [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (path, kind) in enumerate(modules)
        ],
    )
    _write(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {} if tiny.prompt is None else {"passage": tiny.prompt},
            "default_prompt_name": None if tiny.prompt is None else "passage",
            "similarity_fn_name": "cosine",
        },
    )


def _write_dense(folder: Path, width: int, tiny: Tiny) -> None:
    from safetensors.torch import save_file

    _write(
        folder / "config.json",
        {
            "in_features": width,
            "out_features": tiny.dense,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )
    generator = torch.Generator().manual_seed(tiny.seed + 1)
    weight = torch.randn(tiny.dense, width, generator=generator) / width**0.5
    save_file(
        {"linear.weight": weight, "linear.bias": torch.randn(tiny.dense, generator=generator)},
        str(folder / "model.safetensors"),
    )


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _word_pieces(special: Sequence[str]) -> dict[str, int]:
    pieces = [*special, *_CHARACTERS, *(f"##{each}" for each in (*_CHARACTERS, *_PIECES)), *_WORDS]
    return {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}


def _with_specials(tokenizer: Tokenizer, special: Mapping[str, str]) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(special.values())]
    )
    return tokenizer


def _with_id(tokenizer: Tokenizer, token: str) -> tuple[str, int]:
    known = tokenizer.token_to_id(token)
    assert known is not None
    return token, known


def _wordpiece(special: Mapping[str, str], vocabulary: Sequence[str], lower: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(_word_pieces(vocabulary), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _with_specials(tokenizer, special)


_BERT = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_ROBERTA = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


def _bert(tiny: Tiny) -> _Words:
    tokenizer = _wordpiece(_BERT, list(_BERT.values()), tiny.lower)
    tokenizer.post_processor = processors.BertProcessing(_with_id(tokenizer, "[SEP]"), _with_id(tokenizer, "[CLS]"))
    if tiny.family == "distilbert":
        return _Words(tokenizer, _BERT, "DistilBertTokenizer")
    return _Words(tokenizer, _BERT, "BertTokenizer", ("input_ids", "token_type_ids", "attention_mask"))


def _mpnet(tiny: Tiny) -> _Words:
    special = {**_ROBERTA, "unk_token": "[UNK]"}
    tokenizer = _wordpiece(special, ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"], tiny.lower)
    tokenizer.post_processor = processors.RobertaProcessing(
        _with_id(tokenizer, "</s>"), _with_id(tokenizer, "<s>"), trim_offsets=True, add_prefix_space=False
    )
    return _Words(tokenizer, special, "MPNetTokenizer")


def _byte_level(vocabulary: Sequence[str]) -> Tokenizer:
    space = "\u0120"
    merges = [
        ("h", "e"),
        (space, "t"),
        (f"{space}t", "he"),
        ("e", "r"),
        ("i", "n"),
        ("in", "g"),
        (space, "w"),
        ("o", "r"),
    ]
    merges += [("or", "d"), (f"{space}w", "ord"), (space, "a"), ("e", "x"), ("t", "ex"), ("tex", "t")]
    # Python's order of a set of strings differs between processes.
    pieces = [*vocabulary, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _roberta(tiny: Tiny) -> _Words:
    tokenizer = _with_specials(_byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]), _ROBERTA)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return _Words(tokenizer, _ROBERTA, "RobertaTokenizer")


def _xlm_roberta(tiny: Tiny) -> _Words:
    start = "\u2581"
    pieces = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces += [(start, -2.0), *((f"{start}{word}", -3.0) for word in _WORDS), *((piece, -3.5) for piece in _PIECES)]
    known = {piece for piece, _ in pieces}
    pieces += [(character, -5.0) for character in _CHARACTERS if character not in known]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _Words(_with_specials(tokenizer, _ROBERTA), _ROBERTA, "XLMRobertaTokenizer")


def _modernbert(tiny: Tiny) -> _Words:
    tokenizer = _with_specials(_byte_level(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]), _BERT)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return _Words(tokenizer, _BERT, "PreTrainedTokenizerFast")


def _qwen(tiny: Tiny) -> _Words:
    end = "<|endoftext|>"
    special = {"pad_token": end, "eos_token": end}
    tokenizer = _with_specials(_byte_level([end]), special)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", pair=None, special_tokens=[(end, 0)])
    return _Words(tokenizer, special, "Qwen2Tokenizer", padding_side="left")


_TOKENIZERS: Mapping[str, Callable[[Tiny], _Words]] = {
    "bert": _bert,
    "distilbert": _bert,
    "mpnet": _mpnet,
    "roberta": _roberta,
    "xlm-roberta": _xlm_roberta,
    "modernbert": _modernbert,
    "qwen2": _qwen,
    "qwen3": _qwen,
}

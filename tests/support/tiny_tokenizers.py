"""Small tokenizers, one for each family of small models: trained on nothing, with words that the tests' texts hold."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_WORDS = "the of and a to in is that it for on text word query passage model".split()  # noqa: SIM905  (or a line each)
_CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation + "äöüß日本語"
#: Word endings and parts, so that words of several pieces come up.
_PIECES = ("er", "ing", "ed", "ion", "th", "an", "re", "on")


class Words(NamedTuple):
    """A family's tokenizer, and the special tokens that its configuration names."""

    tokenizer: Tokenizer
    special: Mapping[str, str]
    tokenizer_class: str
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    padding_side: Literal["left", "right"] = "right"

    def id_of(self, name: str) -> int | None:
        return self.tokenizer.token_to_id(self.special[name]) if name in self.special else None


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


_BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
_ROBERTA = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


def _bert(lower: bool) -> Words:
    tokenizer = _wordpiece(_BERT, list(_BERT.values()), lower)
    tokenizer.post_processor = processors.BertProcessing(_with_id(tokenizer, "[SEP]"), _with_id(tokenizer, "[CLS]"))
    return Words(tokenizer, _BERT, "BertTokenizer", ("input_ids", "token_type_ids", "attention_mask"))


def _distilbert(lower: bool) -> Words:
    return Words(_bert(lower).tokenizer, _BERT, "DistilBertTokenizer")


def _mpnet(lower: bool) -> Words:
    special = {**_ROBERTA, "unk_token": "[UNK]"}
    tokenizer = _wordpiece(special, ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"], lower)
    tokenizer.post_processor = processors.RobertaProcessing(
        _with_id(tokenizer, "</s>"), _with_id(tokenizer, "<s>"), trim_offsets=True, add_prefix_space=False
    )
    return Words(tokenizer, special, "MPNetTokenizer")


def _byte_level(vocabulary: Sequence[str]) -> Tokenizer:
    space = "\u0120"
    merges = [("h", "e"), (space, "t"), (f"{space}t", "he"), ("e", "r"), ("i", "n"), ("in", "g")]
    merges += [(space, "w"), ("o", "r"), ("or", "d"), (f"{space}w", "ord"), (space, "a")]
    merges += [("e", "x"), ("t", "ex"), ("tex", "t")]
    # Python's order of a set of strings differs between processes.
    pieces = [*vocabulary, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _roberta(_lower: bool) -> Words:
    tokenizer = _with_specials(_byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]), _ROBERTA)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return Words(tokenizer, _ROBERTA, "RobertaTokenizer")


def _unigram(special: Sequence[str]) -> list[tuple[str, float]]:
    start = "\u2581"
    pieces = [(token, 0.0) for token in special]
    pieces += [(start, -2.0), *((f"{start}{word}", -3.0) for word in _WORDS), *((piece, -3.5) for piece in _PIECES)]
    known = {piece for piece, _ in pieces}
    return pieces + [(character, -5.0) for character in _CHARACTERS if character not in known]


def _xlm_roberta(_lower: bool) -> Words:
    tokenizer = Tokenizer(models.Unigram([*_unigram(["<s>", "<pad>", "</s>", "<unk>"]), ("<mask>", 0.0)], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return Words(_with_specials(tokenizer, _ROBERTA), _ROBERTA, "XLMRobertaTokenizer")


def _modernbert(_lower: bool) -> Words:
    tokenizer = _with_specials(_byte_level(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]), _BERT)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return Words(tokenizer, _BERT, "PreTrainedTokenizerFast")


def _qwen(_lower: bool) -> Words:
    end = "<|endoftext|>"
    special = {"pad_token": end, "eos_token": end}
    tokenizer = _with_specials(_byte_level([end]), special)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", pair=None, special_tokens=[(end, 0)])
    return Words(tokenizer, special, "Qwen2Tokenizer", padding_side="left")


def _t5(_lower: bool) -> Words:
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = Tokenizer(models.Unigram(_unigram(list(special.values())), unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return Words(_with_specials(tokenizer, special), special, "T5Tokenizer")


def _gemma(_lower: bool) -> Words:
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    vocabulary = [*special.values(), *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *_CHARACTERS]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("e", "r"), ("i", "n"), ("\u2581", "w")]
    pieces = dict.fromkeys([*vocabulary, *("".join(pair) for pair in merges)])
    tokenizer = Tokenizer(
        models.BPE(
            {piece: at for at, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair=None, special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    return Words(_with_specials(tokenizer, special), special, "GemmaTokenizer")


def _clip(_lower: bool) -> Words:
    start, end = "<|startoftext|>", "<|endoftext|>"
    special = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": end}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e</w>"), ("o", "r"), ("i", "n")]
    pieces = [*alphabet, *(f"{each}</w>" for each in alphabet), *("".join(pair) for pair in merges), start, end]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: at for at, piece in enumerate(pieces)},
            merges,
            unk_token=end,
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = Regex(r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = _with_specials(tokenizer, special)
    tokenizer.post_processor = processors.RobertaProcessing(
        _with_id(tokenizer, end), _with_id(tokenizer, start), trim_offsets=False, add_prefix_space=False
    )
    return Words(tokenizer, special, "CLIPTokenizer")


TOKENIZERS: Mapping[str, Callable[[bool], Words]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "roberta": _roberta,
    "xlm-roberta": _xlm_roberta,
    "modernbert": _modernbert,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "mistral": _qwen,
    "gpt2": _qwen,
    "nomic-bert": _bert,
    "gte": _xlm_roberta,
    "gemma": _gemma,
    "t5": _t5,
    "clip": _clip,
}

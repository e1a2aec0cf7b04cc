"""The workloads W1 and W2: real English of given lengths, the same texts every time on the same Python.

A passage of the standard library's documentation that has the wanted length is taken whole. If none is left, passages
are joined and cut at a word.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from statistics import NormalDist, fmean, quantiles
from typing import TYPE_CHECKING

from embedctl_bench.peers.models import Model
from embedctl_bench.peers.tuned import Workload
from embedctl_bench.texts.passages import passages
from embedctl_config.durable import write

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: W1's lengths are log-normal with this median and spread: mean 39, p95 117, p99 near 208, as in real corpora.
_MEDIAN, _SIGMA = 26, 0.914
_SHORTEST, _LONGEST = 8, 256
_LONG = 449


def describe_workload(workload: Workload, limit: int) -> str:
    """A workload's lengths, special tokens included, and how many are longer than a model takes whole."""
    cuts = quantiles(workload.lengths, n=100, method="inclusive")
    cut = sum(length > limit for length in workload.lengths)
    return (
        f"{workload.name}: {len(workload.lengths)} texts, {workload.tokens:,} tokens; a text has "
        f"{min(workload.lengths)}–{max(workload.lengths)}, median {cuts[49]:.0f}, mean {fmean(workload.lengths):.0f}, "
        f"p95 {cuts[94]:.0f}, p99 {cuts[98]:.0f}; sha256 {workload.digest[:12]}…"
        + (f"; {cut} of them are cut at {limit} tokens" if cut else "")
    )


def make_workload(name: str, count: int, model: Model, place: Path) -> Workload:
    """`count` texts of W1, mixed lengths up to 256 tokens, or of W2, 443–449 tokens each; kept in `place`."""
    tokenizer = model.tokenizer()
    path = place / "workloads" / f"{name}-{count}-{sha256(tokenizer.to_str().encode()).hexdigest()[:32]}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        wanted = mixed_lengths(count) if name == "W1" else [_LONG] * count
        write(path, json.dumps(_texts(wanted, tokenizer)).encode())
    texts = json.loads(path.read_text(encoding="utf-8"))
    lengths = tuple(len(each.ids) for each in tokenizer.encode_batch(texts))
    return Workload(name, texts, lengths, chunk=512 if name == "W1" else 48)


def mixed_lengths(count: int) -> list[int]:
    """W1's lengths in tokens: one at each quantile of the distribution, shuffled."""
    normal = NormalDist(math.log(_MEDIAN), _SIGMA)
    lengths = [round(math.exp(normal.inv_cdf((at + 0.5) / count))) for at in range(count)]
    random.Random(0).shuffle(lengths)
    return [min(max(length, _SHORTEST), _LONGEST) for length in lengths]


def _texts(wanted: list[int], tokenizer: Tokenizer) -> list[str]:
    found = [text for _, text in passages()]
    random.Random(0).shuffle(found)
    lengths = [len(encoded.ids) for encoded in tokenizer.encode_batch(found)]
    by_length: dict[int, list[str]] = defaultdict(list)
    for text, length in zip(found, lengths, strict=True):
        by_length[length].append(text)
    # Where none is left, passages are joined in turn, each text going on where the last one ended.
    turn = itertools.cycle(zip(found, lengths, strict=True))
    texts: dict[str, None] = {}  # for its keys are distinct and keep their order
    for length in wanted:
        text = by_length[length].pop() if by_length[length] else ""
        while not text or text in texts:
            text = _joined(turn, length, tokenizer)
        texts[text] = None
    return list(texts)


def _joined(turn: Iterator[tuple[str, int]], length: int, tokenizer: Tokenizer) -> str:
    parts, size = [], 2
    while size < length:
        text, tokens = next(turn)
        parts.append(text)
        size += tokens - 2
    return _cut(" ".join(parts), length, tokenizer)


def _cut(text: str, length: int, tokenizer: Tokenizer) -> str:
    """The text's first words that make at most `length` tokens with the two special ones."""
    encoded = tokenizer.encode(text)
    if len(encoded.ids) <= length:
        return text
    last = length - 2  # the tokens to keep are 1 … last
    while encoded.word_ids[last] == encoded.word_ids[last + 1]:
        last -= 1
    return text[: encoded.offsets[last][1]]

"""The longest text that a loaded model takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

#: The longest text of a model without a limit (tokens).
UNLIMITED = 2**31 - 1


def longest_text(model: SentenceTransformer) -> int:
    """Most tokens of a text, special ones included: what the model states, but no more than it has positions for.

    RoBERTa and its kin have 514 embeddings of positions, and a text uses all but two. Some models state 514, and fail
    with the texts that are longer than 512. A model without a limit has :data:`UNLIMITED`.
    """
    limits = [model.max_seq_length or UNLIMITED, UNLIMITED]
    for part in model.modules():
        positions = getattr(getattr(part, "position_embeddings", None), "num_embeddings", None)
        if positions is not None:
            padding = getattr(part, "padding_idx", None)
            limits.append(positions - (0 if padding is None else padding + 1))
    return int(min(limits))

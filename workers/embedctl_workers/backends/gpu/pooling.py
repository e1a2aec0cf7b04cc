"""sentence-transformers' pooling, with indices made on the host: a forward asks the device nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules import Pooling

from embedctl_config.errors import ModelError
from embedctl_workers.arrays.tokens import Rows

_LEAST = 1e-9


class HostIndexedPooling(Pooling):
    """Pools as its base does, which in some releases waits for the device."""

    @classmethod
    def like(cls, module: Any) -> torch.nn.Module:
        """The module itself, or for a Pooling one of this class that pools alike."""
        if type(module) is Pooling:
            module = cls(**module.get_config_dict())
        same: torch.nn.Module = module
        return same

    def indices(self, lengths: Rows, prompt_tokens: int | None) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays that :meth:`forward` needs as features for packed texts of these lengths.

        `text` holds, for each pooled token, the text that it belongs to. If some tokens are left out, `pooled` holds
        the others, and `weights` the place of each in its text, from 1.
        """
        text = np.repeat(np.arange(len(lengths)), lengths)
        if not self._chooses(prompt := prompt_tokens if not self.include_prompt else None):
            return {"text": text}
        places = np.arange(1, len(text) + 1) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        pooled = np.flatnonzero(places > (prompt or 0))
        return {"text": text[pooled], "pooled": pooled, "weights": places[pooled]}

    def _chooses(self, prompt_length: int | None) -> bool:
        return bool(prompt_length) or "weightedmean" in self._modes

    @property
    def _modes(self) -> tuple[str, ...]:
        return (self.pooling_mode,) if isinstance(self.pooling_mode, str) else tuple(self.pooling_mode)

    @staticmethod
    def _exclude_prompt_from_mask(attention_mask: torch.Tensor, prompt_length: int) -> torch.Tensor:
        begins = attention_mask.to(torch.int32).argmax(dim=1, keepdim=True)
        places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        return attention_mask.masked_fill(places < begins + prompt_length, 0)

    def _forward_flattened(
        self, token_embeddings: torch.Tensor, features: dict[str, Any], prompt_length: int | None = None
    ) -> list[torch.Tensor]:
        # Releases of the base differ in where they ask the device and wait for the answer: none of them is called.
        return list(self._pooled(token_embeddings[0], features, prompt_length or 0))

    def _pooled(self, x: torch.Tensor, features: dict[str, Any], prompt: int) -> Iterator[torch.Tensor]:
        """The vectors of each mode, texts × hidden; `x` is tokens × hidden, float32."""
        offsets, text = features["cu_seq_lens_q"], features["text"].long()
        lengths = offsets[1:] - offsets[:-1]
        chosen = x.index_select(0, features["pooled"]) if "pooled" in features else x
        count = (lengths - prompt).to(x.dtype).clamp(min=_LEAST)[:, None]

        def total(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(len(lengths), values.shape[1]).index_add(0, text, values)

        for mode in self._modes:
            match mode:
                case "cls":
                    yield x[offsets[:-1] + torch.where(lengths > prompt, prompt, 0)]
                case "lasttoken":
                    yield x[offsets[1:] - 1]
                case "mean":
                    yield total(chosen) / count
                case "mean_sqrt_len_tokens":
                    yield total(chosen) / count.sqrt()
                case "max":
                    least = x.new_full((len(lengths), x.shape[1]), -torch.inf)
                    yield least.scatter_reduce(0, text[:, None].expand_as(chosen), chosen, reduce="amax")
                case "weightedmean":
                    weights = features["weights"].to(x.dtype)[:, None]
                    yield total(chosen * weights) / total(weights).clamp(min=_LEAST)
                case _:
                    raise ModelError(f"the model pools by {mode!r}, which the packed engine does not know")

"""The attention masks of transformers' models, made without asking the device anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

#: Whether any token of the batch is padding; None outside of :func:`masking`, where transformers looks by itself.
_padded: ContextVar[bool | None] = ContextVar("padded", default=None)


def look_at_no_masks() -> None:
    """Let transformers' models make their masks as :func:`masking` says.

    Otherwise each forward looks whether any token is padding (masking_utils.py, `padding_mask.all()`). It then waits
    for the device, and the next batch can't be begun meanwhile. The host knows the answer.
    """
    AttentionMaskInterface.register("sdpa", _told(sdpa_mask))
    AttentionMaskInterface.register("eager", _told(eager_mask))


@contextmanager
def masking(*, padded: bool) -> Iterator[None]:
    """A context for the forward of a batch in which some tokens are padding, or none is."""
    before = _padded.set(padded)
    try:
        yield
    finally:
        _padded.reset(before)


def _told(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes masks, which does not look whether they mask anything. It makes None if they do not."""

    def mask(*args: Any, **facts: Any) -> Any:
        match _padded.get():
            case True:
                facts |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            case False:
                facts |= {"attention_mask": None}
        return make(*args, **facts)

    return mask

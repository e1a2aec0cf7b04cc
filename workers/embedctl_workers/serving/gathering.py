"""Which small chunks are encoded in one batch with others."""

from __future__ import annotations

from embedctl_workers.serving.claimed import ClaimedChunk

#: A token is about so many bytes of text.
_TOKEN_BYTES = 4


def is_small(claimed: ClaimedChunk) -> bool:
    """Whether other chunks are to be joined to a claimed one."""
    return 2 * len(claimed.payload) <= _budget(claimed) and may_be_joined(claimed)


def may_be_joined(claimed: ClaimedChunk) -> bool:
    """Whether a claimed chunk may be in one batch with others: not if anybody has failed with it."""
    return (
        claimed.held.attempt == 1
        and not claimed.is_suspect
        and claimed.job.data is None  # else its place may keep the others waiting
        and claimed.job.model == claimed.held.model
        and not claimed.encoder.backend.joins
    )


def room(claimed: ClaimedChunk) -> int:
    """How many bytes of other chunks fit into one batch with a claimed one."""
    return _budget(claimed) - len(claimed.payload)


def _budget(claimed: ClaimedChunk) -> int:
    return claimed.encoder.token_budget * _TOKEN_BYTES

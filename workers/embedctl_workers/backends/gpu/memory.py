"""How many tokens a batch may have on a device: what its memory allows, and what it turned out not to."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from embedctl_config.errors import ModelError
from embedctl_workers.models.cache import distrusted, keep

log = logging.getLogger(__name__)

#: Tokens of a batch: more make a GPU no faster.
MOST_TOKENS = 32_768
#: Tokens of the batch whose memory is measured.
SAMPLE_TOKENS = 4_096
#: The share of the free memory that a batch may take.
_SHARE = 0.8


def affordable(peak: int, tokens: int, free: int) -> int:
    """Tokens that a batch may have, at most :data:`MOST_TOKENS`, when one of `tokens` took `peak` bytes.

    Args:
        free: bytes.
    """
    if peak <= 0:
        return MOST_TOKENS
    return max(1, min(MOST_TOKENS, int(_SHARE * free * tokens / peak)))


class Limit:
    """The budget that a model on a kind of device was brought down to, which outlives the process.

    Args:
        cache: the cache folder.
        deciding: what it holds for: the device's name and memory, the model's fingerprint, and the type.
    """

    def __init__(self, cache: Path, *deciding: object) -> None:
        key = hashlib.sha256(json.dumps([str(each) for each in deciding]).encode()).hexdigest()
        self._path = cache / "budgets" / f"{key[:32]}.json"

    def load(self) -> int | None:
        """Tokens; None where it was never brought down, or that can't be read."""
        try:
            if wrong := distrusted(self._path):
                log.warning("%s is not read, for it is not trusted: %s", self._path, wrong)
                return None
            tokens = json.loads(self._path.read_text(encoding="utf-8"))["tokens"]
            if type(tokens) is not int or tokens < 1:
                raise ValueError(f"tokens is {tokens!r}")  # noqa: TRY301  (one message for whatever is wrong)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the token budget of the last run can't be read: %s: %s", self._path, error)
            return None
        return int(tokens)

    def save(self, tokens: int) -> None:
        """Keep it, or say in the log why it can't be kept."""
        try:
            keep(self._path, json.dumps({"tokens": tokens}).encode())
        except (OSError, ModelError) as error:
            log.warning("the token budget is not kept for the next start: %s", error)

"""The most tokens of a batch on a device: what its memory allows."""

from __future__ import annotations

from embedctl_config.errors import SettingsError

#: Most tokens of a batch of any model.
MOST_TOKENS = 131_072
#: Most tokens of a batch of a packed model with larger vectors, and of a padded batch: more make a GPU no faster.
_MOST_LARGE, _MOST_PADDED = 65_536, 32_768
#: The most dimensions of a small model. A batch of it is done before the next one is begun, unless it is large.
_SMALL = 512
#: Tokens of the batch whose memory is measured.
SAMPLE_TOKENS = 4_096
#: The share of the free memory that a batch may take.
_SHARE = 0.8
#: What a process holds on a device besides torch's tensors, in bytes: the driver's context and the libraries' code. An
#: estimate, for it is not verified on hardware.
CONTEXT_BYTES = 512 << 20


def part_of(total: int, workers: int) -> int:
    """Bytes of a device's `total` that torch may take in each of the workers that share it; a SettingsError if none.

    A part of the total memory, not of the free memory: so it is the same for the worker that loads first, for the one
    that loads last, and for one that is restarted while the others hold their parts.
    """
    if workers == 1:
        return total
    part = total // workers - CONTEXT_BYTES
    if part <= 0:
        raise SettingsError(
            f"{workers} workers can't share a GPU of {total / 1e9:.1f} GB, because each takes "
            f"{CONTEXT_BYTES / 1e9:.1f} GB before it loads a model: set a lower workers_per_device or --gpu-workers"
        )
    return part


def most_tokens(dim: int, *, packed: bool) -> int:
    """The most tokens of a batch that a model with vectors of `dim` dimensions profits from."""
    if not packed:
        return _MOST_PADDED
    return MOST_TOKENS if dim <= _SMALL else _MOST_LARGE


def affordable(peak: int, tokens: int, free: int, most: int) -> int:
    """The most tokens of a batch, up to `most`, if a batch of `tokens` took `peak` bytes and `free` bytes are free."""
    if peak <= 0:
        return most
    return max(1, min(most, int(_SHARE * free * tokens / peak)))

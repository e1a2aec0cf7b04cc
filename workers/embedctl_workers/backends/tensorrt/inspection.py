"""What TensorRT made of a graph: whether attention runs as one kernel."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

#: The fused kernels' names, such as `_gemm_mha_v2_0x1a2b`, with the prefixes and suffixes that versions add.
_FUSED = re.compile(r"_mha(_|\b)")
#: The end of the names of a profile's layers; those of the first profile have none.
_PROFILE = re.compile(r"\[profile (\d+)\]$")


def fused_attention(told: str, profiles: int) -> Sequence[int] | None:
    """How many fused attention kernels each profile of a plan has; None if the text says nothing of layers.

    `told` is the JSON of TensorRT's engine inspector, of a plan that was built with details.
    """
    try:
        layers = json.loads(told)["Layers"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(layers, list) or not layers:
        return None
    found: Counter[int] = Counter()
    for layer in layers:
        name, tactic = _names(layer)
        if _FUSED.search(name) or _FUSED.search(tactic):
            profile = _PROFILE.search(name)
            found[int(profile[1]) if profile else 0] += 1
    return [found[at] for at in range(profiles)]


def _names(layer: Any) -> tuple[str, str]:
    """A layer's name, and that of its kernel; of a plan without details, a layer is its name."""
    if isinstance(layer, dict):
        return str(layer.get("Name", "")), str(layer.get("TacticName", ""))
    return str(layer), ""

"""Fingerprints: sha256 over everything that determines the vectors.

Workers compute the model's part (weights, tokenizer, pooling, normalisation, maximum length). This module combines it
with the job's options. Neither part includes backend or device; the precision is kept separately.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: The options of a job that determine its vectors.
DECIDING_OPTIONS = ("prompt", "long", "normalize")
#: Options that count only if a job sets them.
LATER_OPTIONS = ("dimensions", "prompt_name", "vectors")


def job_fingerprint(model_fingerprint: str, options: Mapping[str, Any]) -> str:
    """The fingerprint of a job's vectors, in hexadecimal: its model's fingerprint joined with its own options."""
    text = json.dumps([model_fingerprint, deciding(options)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a job that determine its vectors."""
    later = {name: options[name] for name in LATER_OPTIONS if options.get(name) is not None}
    return {name: options.get(name) for name in DECIDING_OPTIONS} | later

"""Fingerprints: sha256 over what decides the vectors.

The model's part (weights, tokenizer, pooling, normalisation, maximum length) is known to workers and made there. The
job's part is hashed here, from the job's options. Backend and device are in neither; the precision stands beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: The options of a job that decide its vectors.
DECIDING_OPTIONS = ("prompt", "truncation", "normalize")
#: The same, of options that came later: they count where a job has them, so that older jobs keep their fingerprints.
LATER_OPTIONS = ("dimensions",)


def job_fingerprint(model_fingerprint: str, options: Mapping[str, Any]) -> str:
    """The fingerprint of a job's vectors, in hexadecimal: its model's fingerprint joined with its own options."""
    deciding = {name: options.get(name) for name in DECIDING_OPTIONS}
    deciding |= {name: options[name] for name in LATER_OPTIONS if options.get(name) is not None}
    text = json.dumps([model_fingerprint, deciding], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

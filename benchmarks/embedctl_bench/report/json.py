"""A whole report as JSON, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from embedctl_bench.report.report import Report


def document(report: Report) -> str:
    """The report's fields by name. NaN and infinity become null."""
    return json.dumps(_plain(asdict(report)), indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _plain(value: object) -> object:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

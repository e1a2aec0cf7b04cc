"""What a key is for. A call names the verbs that may make it, and a key needs one of them."""

from __future__ import annotations

from collections.abc import Mapping

#: Verb → what its keys may do.
VERBS: Mapping[str, str] = {
    "embed": "embed texts",
    "batches": "files and batches",
    "jobs": "jobs, as commands and library make them",
    "read": "see files, batches and jobs, and change nothing",
    "metrics": "the metrics, which tell of all tenants",
}
#: The verbs of a key that is made without naming any: what concerns its tenant alone.
USUAL = ("embed", "batches", "jobs")

EMBED, BATCHES, JOBS, METRICS = ("embed",), ("batches",), ("jobs",), ("metrics",)
READ_BATCHES, READ_JOBS = ("batches", "read"), ("jobs", "read")
#: Of calls for every holder of a key who is not only to see the metrics, and of those for everybody.
ANY, OPEN = (*USUAL, "read"), ()

"""The entries that all builders put into an artefact's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from embedctl_config.hardware import HardwareClass
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.accuracy.report import Report
from embedctl_workers.backends.base import Backend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.machine.provenance import versions
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import gate_texts

#: The packages that affect any artefact.
PACKAGES = ("embedctl", "torch", "transformers", "sentence-transformers", "tokenizers")


def origin_of(request: Mapping[str, Any], files: ModelFiles, engine: str, *packages: str) -> dict[str, Any]:
    """The manifest's entries about what was built of what, with the versions of `packages` beside :data:`PACKAGES`."""
    weights = sum(path.stat().st_size for path in files.folder.glob("*.safetensors"))
    source, revision = str(files.folder), request["revision"]
    return {
        "model": {"name": files.name, "source": source, "weights_bytes": weights, "revision": revision},
        "engine": engine,
        "built": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions((*PACKAGES, *packages)),
    }


def report_of(backend: Backend, hardware: HardwareClass, host: Host) -> Report:
    """The accuracy of a backend's vectors, measured as the gate does."""
    report = measure_backend(ChunkEncoder(backend, backend.token_budget), hardware, host)
    assert report is not None  # only a backend without a reference has none
    return report


def accuracy_of(report: Report) -> dict[str, Any]:
    """The manifest's entry about the accuracy of the vectors."""
    measured = report.checks[0].measured
    return {
        "against": "sentence-transformers on torch in fp32, text by text, normalised",
        "texts": f"the {len(gate_texts())} of the accuracy gate",
        "max_abs_error": measured.max_abs_error,
        "mean_cosine": measured.mean_cosine,
        "min_cosine": measured.min_cosine,
        "passed": report.passed,
        "bounds": report.bounds.stated(),
    }

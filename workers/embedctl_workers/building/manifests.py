"""The entries that all builders put into an artefact's manifest."""

from __future__ import annotations

from typing import Any

from embedctl_workers.accuracy.report import Report
from embedctl_workers.backends.base import Backend
from embedctl_workers.models.files import ModelFiles
from embedctl_workers.models.gate_texts import gate_texts


def model_of(files: ModelFiles) -> dict[str, Any]:
    """The manifest's entry about the model."""
    weights = sum(path.stat().st_size for path in files.folder.glob("*.safetensors"))
    return {"name": files.name, "source": str(files.folder), "weights_bytes": weights}


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


def rate_of(backend: Backend, texts_per_s: float, threads: int) -> dict[str, Any]:
    """The manifest's entry about the speed, measured on the gate's texts."""
    lengths = backend.tokenize(gate_texts(), None).lengths
    return {
        "sentences_per_s": round(texts_per_s, 1),
        "tokens_per_s": round(texts_per_s * float(lengths.mean()), 1),
        "threads": threads,
        "texts": f"the same, {int(lengths.sum())} tokens",
    }

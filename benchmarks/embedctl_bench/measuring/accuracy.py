"""Accuracy in `matrix` and `grid`: the same texts, in requests of one size, compared with `transformers`."""

from __future__ import annotations

from collections.abc import Mapping

from embedctl_bench.measuring.cells import Bench
from embedctl_bench.measuring.models import slug
from embedctl_bench.measuring.texts import digest, sentences
from embedctl_bench.peers.registry import TRANSFORMERS, System
from embedctl_bench.report.report import Column, Table
from embedctl_workers.models.files import ModelFiles

#: The number of texts that are compared, and the number in a request.
_TEXTS, _BATCH = 64, 16


def measure_accuracy(bench: Bench, model: ModelFiles, engines: Mapping[System, str]) -> dict[str, dict[str, float]]:
    """How far each system's vectors are from the reference's, by the system's name."""
    others = {system.name: (system, _BATCH) for system in engines if system != TRANSFORMERS}
    return bench.accuracy(others, TRANSFORMERS, model, sentences(_TEXTS))


def accuracy_table(
    model: ModelFiles, accuracy: Mapping[str, Mapping[str, float]], engines: Mapping[System, str]
) -> Table:
    """What :func:`measure_accuracy` returned, beside the systems' engines."""
    columns = (
        Column("system", "system"),
        Column("max_abs_error", "max abs error"),
        Column("min_cosine", "min cosine", digits=6),
        Column("mean_cosine", "mean cosine", digits=6),
        Column("engine", "engine"),
    )
    by_name = {system.name: engine for system, engine in engines.items()}
    rows = [
        {"system": name, **figures, "max_abs_error": f"{figures['max_abs_error']:.1e}", "engine": by_name[name]}
        for name, figures in accuracy.items()
    ]
    texts = sentences(_TEXTS)
    reference = f" ({engines[TRANSFORMERS]})" if TRANSFORMERS in engines else ""
    note = (
        f"Vectors of unit length of {len(texts)} sentences (sha256 {digest(texts)}…) in requests of {_BATCH}, against "
        f"`transformers` on torch in fp32, each text by itself{reference}."
    )
    return Table(f"{slug(model.name)}-accuracy", f"{model.name}: accuracy", columns, rows, note)

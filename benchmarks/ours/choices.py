"""The probe of choices by speed: whether other work on the machine decides them."""

from __future__ import annotations

import os
from collections import Counter
from unittest.mock import patch

from benchmarks.ours.service import Figures

from embedctl_bench.peers.models import model_files
from embedctl_config.settings import Settings
from embedctl_workers.backends.torch.kept import kept_model
from embedctl_workers.backends.torch.packed import choosing
from embedctl_workers.backends.torch.packed.kernels import load_kernels
from embedctl_workers.machine.host import Host
from embedctl_workers.models.cache import cache_folder


def choices(*, model: str = "all-MiniLM-L6-v2", bf16: bool = False, tries: int = 30) -> Figures:
    """How often each way to compute a model's layers is chosen when it is chosen again and again. Nothing is kept.

    In fp32, torch's products are compared with ours on every CPU. The model has been loaded here before, so that its
    weights are kept.
    """
    host = Host(1, cache_folder(Settings()), build=False)
    kept = kept_model(model_files(model, Settings()), host)
    if kept is None:
        raise SystemExit(f"load it once: embedctl model verify {model}")
    chooser = choosing.Chooser(kept.weights, load_kernels(host), host)
    found: Counter[str] = Counter()
    with patch.object(choosing, "noted", lambda *_: None), patch.object(choosing, "OURS_FASTER", frozenset({""})):
        for _ in range(tries):
            kind = chooser.bf16() if bf16 else chooser.fp32()
            found[kind.name] += 1
    shown = {f"chosen: {name}": float(times) for name, times in found.items()}
    return {**shown, "load of the machine": os.getloadavg()[0]}

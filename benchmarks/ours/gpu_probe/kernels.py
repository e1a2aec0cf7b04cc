"""The kernels of a batch."""

from __future__ import annotations

from benchmarks.ours.gpu_probe.batches import engine_of
from benchmarks.ours.gpu_probe.device import Probed
from benchmarks.ours.gpu_probe.lengths import lengths_of
from benchmarks.ours.gpu_probe.whole import eager
from torch.profiler import ProfilerActivity, profile

_SHOWN = 14


def kernels(probed: Probed) -> None:
    """the kernels of a batch of W2 of the largest model, by their time"""
    run = eager(engine_of(probed.shapes[probed.largest], probed), lengths_of("W2", probed.tokens), probed)
    for _ in range(3):
        run()
    probed.synchronize()
    activities = [ProfilerActivity.CPU] if probed.trial else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as found:
        run()
        probed.synchronize()
    by = "self_cpu_time_total" if probed.trial else "self_cuda_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=_SHOWN, max_name_column_width=70))

"""The whole product with several workers on one GPU, and with other sizes of chunks: Redis, the workers, and a job.

    python -m benchmarks.ours.gpu_workers --output report.md

For each number of workers, chunk size and prefetch, a private Redis and workers of class gpu are started, and one job
of W1 is repeated for some seconds, three times. The share of time during which the device was idle is that of the last
job. `--device cpu` runs the same code with class cpu, to check that it works.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from benchmarks.ours.gpu import NAMES, MeasuredDevice
from benchmarks.ours.gpu_models import PLACE, model_of

from embedctl_bench.engines.workloads import describe_workload, make_workload
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl_pipeline import ProductAdapter
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Timed
from embedctl_bench.peers.models import Model
from embedctl_config.errors import EmbedctlError

#: Workers, chunk size, prefetch. No chunk size is above the number of texts: a duplicate in a chunk is encoded once.
SETTINGS = {
    "gpu": ((1, 512, 4), (1, 4096, 4), (2, 512, 4), (2, 4096, 4), (4, 512, 4), (4, 4096, 4), (1, 512, 8), (1, 4096, 2)),
    "cpu": ((1, 16, 2), (2, 32, 4)),
}
TEXTS = {"gpu": 8192, "cpu": 32}
_ROUNDS = 3
_HEADINGS = ("workers", "chunk size", "prefetch", "texts/s (min–max)", "tokens/s", "idle", "min cosine")


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """The jobs of one setting.

    Attributes:
        idle: the share of time during which the device was idle in the last job; NaN if the driver does not say.
    """

    workers: int
    chunk: int
    prefetch: int
    texts_per_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    idle: float
    vectors: np.ndarray

    def row(self, reference: np.ndarray) -> str:
        """A row of the table; `reference` are other vectors of the same texts."""
        texts = self.texts_per_s
        a, b = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (self.vectors, reference))
        cells = (
            *(f"{self.workers}", f"{self.chunk}", f"{self.prefetch}"),
            f"{median(texts):,.0f} ({min(texts):,.0f}–{max(texts):,.0f})",
            f"{median(self.tokens_per_s):,.0f}",
            "–" if math.isnan(self.idle) else f"{self.idle:.1%}",
            f"{(a * b).sum(axis=1).min():.6f}",
        )
        return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the command line."""
    arguments = _arguments()
    try:
        device = MeasuredDevice(arguments.device, arguments.gpu)
        model = model_of(arguments.model, PLACE, arguments.seed_model)
        workload = make_workload("W1", TEXTS[device.kind], model, PLACE)
    except EmbedctlError as error:
        sys.exit(str(error))
    texts = json.loads(workload.path.read_text(encoding="utf-8"))
    lines = [f"# Several workers on one device: {model.name}\n", f"{device.label}; {len(device.cpus)} CPUs.\n"]
    lines += [f"{describe_workload(workload)}. The cosine is with the first row's vectors.\n"]
    lines += [f"| {' | '.join(_HEADINGS)} |", "|" + " --- |" * len(_HEADINGS)]
    first, failed = None, []
    for setting in SETTINGS[device.kind]:
        what = "{} workers, chunks of {}, prefetch {}".format(*setting)
        try:
            found = _measure(device, model, texts, setting, arguments.seconds)
        except (EmbedctlError, RuntimeError) as error:
            print(f"{what}: failed: {error}", file=sys.stderr, flush=True)
            failed.append(what)
            continue
        first = found.vectors if first is None else first
        lines.append(found.row(first))
        print(f"{what}: {median(found.texts_per_s):,.0f} texts/s", file=sys.stderr, flush=True)
        if arguments.output:
            arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_workers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=NAMES, default="minilm", help=f"of {', '.join(NAMES)} (default: minilm)")
    parser.add_argument("--device", choices=list(SETTINGS), default="gpu", help="cpu only tries the script")
    parser.add_argument("--gpu", help="UUID or number, where there are several")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each job (default: 4)")
    parser.add_argument("--seed-model", type=Path, metavar="FOLDER", help="as in benchmarks.ours.gpu")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Markdown, written after each row")
    return parser.parse_args()


def _measure(
    device: MeasuredDevice, model: Model, texts: Sequence[str], setting: tuple[int, int, int], seconds: float
) -> MeasuredSetting:
    workers, chunk, prefetch = setting
    product = ProductAdapter(
        model.folder, 1, workers, str(PLACE / "cache"), chunk, device.kind, entry={"prefetch": prefetch}
    )
    try:
        once = [product.encode(texts) for _ in range(2)][1]
        repeated = list(texts) * max(1, math.ceil(seconds / once.seconds))
        jobs: list[Timed] = [product.encode(repeated) for _ in range(_ROUNDS - 1)]
        with device.sampled() as samples:
            jobs.append(product.encode(repeated))
    finally:
        product.close()
    # The ends are left out: the driver's samples lag, and the queue is not full.
    edge = jobs[-1].seconds / 4
    return MeasuredSetting(
        *setting,
        tuple(len(repeated) / job.seconds for job in jobs),
        tuple(job.tokens / job.seconds for job in jobs),
        samples.idle(jobs[-1].began + edge, jobs[-1].ended - edge),
        once.vectors,
    )


if __name__ == "__main__":
    main()

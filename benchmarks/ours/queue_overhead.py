"""What the queue adds: a job through Redis and a warm worker against the same backend called directly.

    python benchmarks/ours/queue_overhead.py corpus.jsonl [--pairs 5] [--cpus 0-1]

Both sides load the same model, are pinned to the same CPUs and encode the same chunks in the same batches. The queue is
timed from the first claim to the last vector stored, the direct side from the first tokenised text to the last vector
in memory. Pairs are interleaved, so that a drift of the machine affects both sides; the figure is the median of the
paired ratios. The vectors of both sides are compared.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embedctl.records import Record
    from embedctl_config.wire import ChunkInput

VERSIONS = ("torch", "sentence-transformers", "tokenizers", "numpy", "celery", "kombu", "redis")


def main() -> None:
    arguments = _arguments()
    if arguments.direct:
        _serve_directly(arguments)
    else:
        _compare(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--records", type=int, default=4096)
    parser.add_argument("--cpus", default=None)
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--vectors", help=argparse.SUPPRESS)
    return parser.parse_args()


def _serve_directly(arguments: argparse.Namespace) -> None:
    """The direct side: encode every chunk each time a line comes in, and answer with the seconds that it took."""
    from embedctl_workers.machine import devices

    pinned = devices.pin(arguments.cpus)

    import numpy as np

    from embedctl_config.settings import Settings
    from embedctl_workers.encoding.loading import load_encoder
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.cache import cache_folder

    entry = Settings().hardware_class("cpu")
    host = Host(pinned.threads, cache_folder(Settings()), places=pinned.places)
    encoder = load_encoder(Settings(), entry, arguments.model, host)
    chunks = _chunks(arguments)
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        encoded = [encoder.encode(encoder.prepare(chunk, {"normalize": True})) for chunk in chunks]
        seconds = time.perf_counter() - started
        np.save(arguments.vectors, np.concatenate([each.vectors for each in encoded]))
        print(seconds, flush=True)


def _chunks(arguments: argparse.Namespace) -> list[ChunkInput]:
    from embedctl.chunking import chunks_of
    from embedctl_config.settings import Settings

    settings = Settings()
    return list(chunks_of(_records(arguments), max_rows=settings.chunk_size, max_bytes=settings.chunk_bytes))


def _records(arguments: argparse.Namespace) -> list[Record]:
    from embedctl.corpus import open_corpus
    from embedctl_config.settings import Settings

    corpus = open_corpus(arguments.corpus, max_bytes=Settings().max_text_bytes)
    return list(islice(corpus.records(), arguments.records))


def _compare(arguments: argparse.Namespace) -> None:
    import numpy as np

    from embedctl.broker import Broker
    from embedctl.enqueue import submit
    from embedctl.job_options import SubmitOptions
    from embedctl.local import local_worker, private_redis
    from embedctl_config.cpu import cpu_name
    from embedctl_config.settings import Settings

    records = _records(arguments)
    with tempfile.TemporaryDirectory() as folder:
        vectors_file = Path(folder) / "direct.npy"
        direct = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--direct", "--vectors", str(vectors_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert direct.stdin
        assert direct.stdout
        try:
            assert direct.stdout.readline().strip() == "ready"

            def run_direct() -> float:
                assert direct.stdin
                assert direct.stdout
                direct.stdin.write("go\n")
                direct.stdin.flush()
                return float(direct.stdout.readline())

            with (
                private_redis(Settings(), Path(folder)) as settings,
                local_worker(
                    settings,
                    hardware="cpu",
                    model=arguments.model,
                    cpus=arguments.cpus,
                    log_file=Path(folder) / "worker.log",
                ),
            ):
                broker = Broker.connect(settings)

                def run_queued() -> tuple[float, int, np.ndarray]:
                    job = submit(broker, records, SubmitOptions(model=arguments.model, hardware="cpu"))
                    status = job.wait()
                    assert status.done == len(records), job.errors()
                    assert status.started_at
                    assert status.ended_at
                    vectors = job.vectors()
                    job.discard()
                    return (status.ended_at - status.started_at).total_seconds(), status.tokens, vectors

                run_direct(), run_queued()  # both warm
                ratios = []
                for pair in range(arguments.pairs):
                    if pair % 2:
                        direct_s = run_direct()
                        queued_s, tokens, vectors = run_queued()
                    else:
                        queued_s, tokens, vectors = run_queued()
                        direct_s = run_direct()
                    ratios.append(queued_s / direct_s)
                    print(
                        f"pair {pair + 1}: direct {direct_s:6.2f} s, queued {queued_s:6.2f} s, ratio {ratios[-1]:.3f}"
                    )
                difference = float(np.abs(vectors - np.load(vectors_file)).max())
                broker.close()
        finally:
            direct.stdin.close()
            direct.wait()
    print(
        f"median ratio queued / direct {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f}); "
        f"{len(records)} records, {tokens} tokens, {tokens / queued_s:,.0f} tokens/s queued; "
        f"max abs difference of vectors {difference:.1e}"
    )
    print(f"{os.cpu_count()} CPUs of {cpu_name()}; Python {platform.python_version()}; ", end="")
    print(", ".join(f"{name} {version(name)}" for name in VERSIONS))


if __name__ == "__main__":
    main()

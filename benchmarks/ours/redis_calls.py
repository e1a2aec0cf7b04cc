"""The cost of a chunk for Redis when nothing fails: commands and bytes, by INFO commandstats and INFO stats.

    python benchmarks/ours/redis_calls.py [--chunks 1000] [--rows 16] [--chunk-files URL]

A private Redis, one worker without a model and one producer, which submits and then polls once a second. Commands that
scripts run are counted too. Heartbeats and the reaper cost Redis by the second, not by the chunk: the idle stack's
commands in the same time are measured first and subtracted. With `--chunk-files`, the bytes of chunks are outside of
Redis: in a folder, or in a bucket that the environment leads to.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from embedctl import enqueue_embeddings
from embedctl.local import local_worker, private_redis
from embedctl.store.connection import Connection
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=16, help="records in a chunk")
    parser.add_argument("--chunk-files", default="", help="a folder, or s3://BUCKET/PREFIX")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = Path(folder) / "embedctl.toml"
        config.write_text('[classes.dummy]\nbackend = "dummy"\noptions = {dim = 384}\n')
        os.environ["EMBEDCTL_CONFIG"] = str(config)  # for the worker
        plain = Settings(
            model="dummy",
            hardware="dummy",
            classes={"dummy": HardwareClass(backend="dummy", options={"dim": 384})},
        )
        settings = stack.enter_context(private_redis(plain, Path(folder))).replace(chunk_files=options.chunk_files)
        log_file = Path(folder) / "worker.log"
        stack.enter_context(local_worker(settings, hardware="dummy", model="dummy", cpus=None, log_file=log_file))
        _measure(settings, options.chunks, options.rows)


def _measure(settings: Settings, chunks: int, rows: int) -> None:
    connection = Connection(settings)
    texts = [f"passage {number} " + "word " * 40 for number in range(chunks * rows)]
    enqueue_embeddings(texts[:rows], settings=settings, chunk_size=rows).wait()
    idle_s = 12.0
    before = _stats(connection)
    time.sleep(idle_s)
    idle = _difference(before, _stats(connection))
    before, started = _stats(connection), time.monotonic()
    job = enqueue_embeddings(texts, settings=settings, chunk_size=rows)
    looks = 0
    while not job.status().state.ended:
        looks += 1
        time.sleep(1.0)
    seconds = time.monotonic() - started
    work = _difference(before, _stats(connection))
    assert job.status().done == len(texts)
    print(f"{chunks} chunks of {rows} records in {seconds:.1f} s, {looks} looks; for each chunk:")
    for name in sorted(work):
        each = (work[name] - idle.get(name, 0) * seconds / idle_s) / chunks
        if each >= 0.05:
            print(f"  {name:<24} {each:10.2f}")


def _stats(connection: Connection) -> dict[str, float]:
    with connection.client() as client:
        commands = client.info("commandstats")
        stats = client.info("stats")
    counts = {name.removeprefix("cmdstat_"): float(facts["calls"]) for name, facts in commands.items()}
    return {**counts, "bytes in": stats["total_net_input_bytes"], "bytes out": stats["total_net_output_bytes"]}


def _difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


if __name__ == "__main__":
    main()

"""How long a chunk waits when its worker is killed: SIGKILL to the next claim, with a second worker idle.

    python benchmarks/ours/recovery.py [--kills 20] [--lease 15]

A private Redis and two workers without a model run with the default settings. One of the workers claims a job of one
chunk, which takes longer than the trial. It is killed at a random moment within two heartbeats, and the time until the
other worker owns the chunk is measured. Then the job is cancelled and both workers are replaced. With --alone the
neighbour of the dead worker can't see its death, as if it were on another machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from embedctl import Job, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.local import local_worker, private_redis
from embedctl_config import keys
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings

OPTIONS = {"dim": 16, "seconds_per_batch": 1.0}
TEXTS = [f"passage {number} " + "word " * 200 for number in range(400)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--lease", type=float, default=Settings().lease_s)
    parser.add_argument("--alone", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "embedctl.toml"
        config.write_text(
            f'lease_s = {arguments.lease}\n[classes.dummy]\nbackend = "dummy"\ntoken_budget = 256\n'
            "options = {dim = 16, seconds_per_batch = 1.0}\n"
        )
        os.environ["EMBEDCTL_CONFIG"] = str(config)  # for the workers
        entry = HardwareClass(backend="dummy", token_budget=256, options=OPTIONS)
        plain = Settings(model="dummy", hardware="dummy", classes={"dummy": entry}, lease_s=arguments.lease)
        with private_redis(plain, Path(folder)) as settings:
            waited = sorted(_trials(settings, Path(folder), arguments))
    p95 = waited[min(len(waited) - 1, int(0.95 * len(waited)))]
    print(
        f"{len(waited)} kills, lease {arguments.lease:g} s, {'another' if arguments.alone else 'the same'} machine: "
        f"p50 {statistics.median(waited):.1f} s, p95 {p95:.1f} s, max {waited[-1]:.1f} s"
    )


def _trials(settings: Settings, folder: Path, arguments: argparse.Namespace) -> Iterator[float]:
    broker = Broker.connect(settings)
    while broker.connection.uptime_s() < 2 * settings.lease_s:  # no reaper acts so soon after Redis started
        time.sleep(1)
    for trial in range(arguments.kills):
        with ExitStack() as stack:
            for number in range(2):
                stack.enter_context(_worker(settings, folder / f"worker-{trial}-{number}.log"))
            job = enqueue_embeddings(iter(TEXTS), settings=settings)  # a list would be divided among both workers
            while not (owner := _owner(broker, job)):
                time.sleep(0.01)
            time.sleep(random.uniform(0, 10))
            doomed = next(row for row in broker.workers.alive() if row.instance == owner)
            if arguments.alone:
                with broker.connection.client() as client:
                    client.unlink(keys.machine(doomed.machine))
            os.kill(doomed.pid, signal.SIGKILL)
            killed = time.monotonic()
            while _owner(broker, job) in (owner, ""):
                time.sleep(0.01)
            waited = time.monotonic() - killed
            job.cancel()
        print(f"  {waited:.1f} s", flush=True)
        yield waited


@contextmanager
def _worker(settings: Settings, log_file: Path) -> Iterator[None]:
    with local_worker(settings, hardware="dummy", model="dummy", cpus=None, log_file=log_file):
        yield


def _owner(broker: Broker, job: Job) -> str:
    """The worker that owns the job's first chunk, or an empty string."""
    with broker.connection.client() as client:
        owner = client.hget(keys.owners(job.id), 0)
    return owner.decode().split(" ")[1] if owner else ""


if __name__ == "__main__":
    main()

"""`python -m tests.chaos --minutes 10 --seed 1`: break embedctl for some time, then count what was lost or doubled.

Exits with 0 if nothing was lost, doubled, wrong or left over, else with 1.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from pathlib import Path

from tests.chaos.campaign import run
from tests.chaos.faults import faults_named
from tests.chaos.options import DUMMY, Options
from tests.chaos.report import markdown


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    options = _options(arguments)
    print(f"seed {options.seed}, {options.minutes:g} minutes, lease {options.lease:g} s", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    outcome = run(options)
    page = markdown(outcome)
    print(page)
    if options.report is not None:
        options.report.write_text(page, encoding="utf-8")
    return 0 if outcome.good else 1


def _options(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults go on (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="of jobs and faults (default: a random one)")
    parser.add_argument("--workers", type=int, default=None, help="worker processes (default: 3; real model: 2)")
    parser.add_argument("--producers", type=int, default=2, help="producer processes at once (default: 2)")
    parser.add_argument("--lease", type=float, dest="lease_s", help="lease_s (default: the product's)")
    parser.add_argument("--pause", type=float, dest="pause_s", help="seconds between two faults, on average")
    parser.add_argument("--settle", type=float, dest="settle_s", help="longest wait for all jobs after the faults")
    parser.add_argument("--ttl", type=float, dest="ttl_s", help="ttl of jobs in seconds")
    parser.add_argument(
        "--no-crashers", dest="crashers", action="store_false", help="no records that kill or hang a worker"
    )
    parser.add_argument(
        "--wait-for-expiry",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="wait until nothing is left in Redis (default: in runs of 5 minutes or more)",
    )
    parser.add_argument("--model", default=DUMMY, help="a real model, on the class cpu (default: the dummy)")
    parser.add_argument(
        "--records",
        type=int,
        help="of a real model's jobs (default: 20000); of all jobs of the dummy, some of which are huge then: with so "
        "many, the run ends, perhaps before its time (default: any number)",
    )
    parser.add_argument("--reference", type=Path, help="where the real model's vectors are kept between runs (.npz)")
    parser.add_argument(
        "--only", action="append", metavar="NAME", default=[], help="draw only faults that begin so; may be repeated"
    )
    parser.add_argument(
        "--sentinels", action="store_true", help="two instances of Redis with sentinels, and failovers among the faults"
    )
    parser.add_argument(
        "--chunk-files",
        choices=("redis", "folder", "s3"),
        default="redis",
        help="where chunks are (default: redis)",
    )
    parser.add_argument("--report", type=Path, help="write the tables here as well")
    parser.add_argument("--keep", type=Path, help="a folder for logs and data that stays")
    given = parser.parse_args(arguments)
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(1_000_000)
    if given.workers is None:
        given.workers = 3 if given.model == DUMMY else 2
    given.only = tuple(given.only)
    try:
        faults_named(given.only)
    except ValueError as error:
        parser.error(str(error))
    return Options(**vars(given))


if __name__ == "__main__":
    sys.exit(main())

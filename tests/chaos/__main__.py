"""`python -m tests.chaos --minutes 10 --seed 1`: break embedctl for some time, then count what was lost or doubled.

Exits with 0 if nothing was lost, doubled, wrong or left over, else with 1.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from dataclasses import fields

from tests.chaos.campaign import run
from tests.chaos.faults import faults_named
from tests.chaos.options import Options
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
    for each in fields(Options):
        name = f"--{each.name.removesuffix('_s').replace('_', '-')}"
        default = list(each.default) if isinstance(each.default, tuple) else each.default
        parser.add_argument(name, dest=each.name, default=default, **each.metadata)
    given = parser.parse_args(arguments)
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(1_000_000)
    given.only = tuple(given.only)
    try:
        faults_named(given.only)
    except ValueError as error:
        parser.error(str(error))
    return Options(**vars(given))


if __name__ == "__main__":
    sys.exit(main())

"""Explores scenarios: ``python -m tests.explorer [SCENARIO …]``."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from tests.explorer.faults import FAULTS
from tests.explorer.machine import Coverage
from tests.explorer.scenarios import SCENARIOS
from tests.support.redis_server import RedisServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__)
    parser.add_argument("scenario", nargs="*", help=f"which of {', '.join(SCENARIOS)}; all where none is named")
    parser.add_argument("--seconds", type=float, default=20.0, help="longest time for each scenario")
    parser.add_argument("--walks", type=int, default=0, help="go at random so often instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first walk; each next one has the next")
    parser.add_argument("--fault", choices=FAULTS, help="a fault to put in")
    chosen = parser.parse_args()
    logging.disable()
    total = Coverage()
    with tempfile.TemporaryDirectory(prefix="ec-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            for name in chosen.scenario or SCENARIOS:
                with SCENARIOS[name].machine(Path(folder), FAULTS.get(chosen.fault)) as machine:
                    seeds = range(chosen.seed, chosen.seed + chosen.walks)
                    walked = machine.walks(seeds, seconds=chosen.seconds)
                    coverage = walked if chosen.walks else machine.explore(seconds=chosen.seconds)
                print(f"{name}: {coverage}", *coverage.found, sep="\nVIOLATION ", flush=True)
                total += coverage
        finally:
            server.stop()
    print(f"{len(chosen.scenario or SCENARIOS)} worlds: {total}, {len(total.found)} violations")
    return 1 if total.found else 0


if __name__ == "__main__":
    raise SystemExit(main())

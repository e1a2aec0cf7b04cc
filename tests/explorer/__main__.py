"""Explores scenarios: ``python -m tests.explorer [SCENARIO …]``."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from tests.explorer.faults import FAULTS
from tests.explorer.scenarios import SCENARIOS
from tests.support.redis_server import RedisServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__)
    parser.add_argument("scenario", nargs="*", help=f"which of {', '.join(SCENARIOS)}; all where none is named")
    parser.add_argument("--seconds", type=float, default=20.0, help="longest time for each scenario")
    parser.add_argument("--depth", type=int, default=99, help="most steps from the first state")
    parser.add_argument("--walks", type=int, default=0, help="go at random so often instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first walk; each next one has the next")
    parser.add_argument("--steps", type=int, default=60, help="of a walk")
    parser.add_argument("--fault", choices=FAULTS, help="a fault to put in")
    parser.add_argument("--first", action="store_true", help="stop at the first violation of a scenario")
    chosen = parser.parse_args()
    logging.disable()
    found = 0
    with tempfile.TemporaryDirectory(prefix="ec-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            for name in chosen.scenario or SCENARIOS:
                found += _one(name, Path(folder), chosen)
        finally:
            server.stop()
    return 1 if found else 0


def _one(name: str, folder: Path, chosen: argparse.Namespace) -> int:
    with SCENARIOS[name].machine(folder, FAULTS.get(chosen.fault, ())) as machine:
        if chosen.walks:
            seeds = range(chosen.seed, chosen.seed + chosen.walks)
            coverage = machine.walks(seeds, steps=chosen.steps, seconds=chosen.seconds)
        else:
            coverage = machine.explore(depth=chosen.depth, seconds=chosen.seconds, stop_at="" if chosen.first else None)
    print(f"{name}: {coverage}", flush=True)
    for each in coverage.found:
        print(f"VIOLATION in {name}: {each}", flush=True)
    return len(coverage.found)


if __name__ == "__main__":
    raise SystemExit(main())

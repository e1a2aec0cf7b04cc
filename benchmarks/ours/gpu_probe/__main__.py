"""Where the time goes on a GPU: the engine for packed tokens on random weights, section by section.

    PYTHONPATH=config:producer:workers:benchmarks python -m benchmarks.ours.gpu_probe [SECTION …]

A section that fails ends alone; the last line and the exit status say so. benchmarks/first_hour.sh runs each section in
a process with a time limit. `--cpu` runs the same code at toy sizes, to see that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from importlib import import_module

import torch
from benchmarks.ours.gpu_probe.device import Probed, open_probed

from embedctl_config.errors import EmbedctlError
from embedctl_workers.backends.gpu.precision import full_precision

#: Each section's module, imported when the section begins: some need nothing but torch. The function has its name.
SECTIONS = {
    "ceilings": "ceilings",
    "varlen": "attention",
    "cudnn": "attention",
    "batches": "whole",
    "graphs": "whole",
    "waits": "checks",
    "repeats": "checks",
    "threads": "checks",
    "kernels": "kernels",
    "compiled": "whole",  # last: it takes minutes
}


def main() -> None:
    """Run the command line."""
    arguments = _arguments()
    try:
        probed = open_probed(trial=arguments.cpu)
    except EmbedctlError as error:
        sys.exit(str(error))
    full_precision()
    print(f"torch {torch.__version__}, {probed.name}", flush=True)
    failed = [name for name in arguments.sections or SECTIONS if not _passes(name, probed)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--cpu", action="store_true", help="toy sizes on the CPU")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}: there are {', '.join(SECTIONS)}")
    return arguments


def _passes(name: str, probed: Probed) -> bool:
    began = time.monotonic()
    print(f"\n## {name}", end="", flush=True)
    try:
        section = getattr(import_module(f"{__package__}.{SECTIONS[name]}"), name)
        print(f": {section.__doc__}", flush=True)
        with torch.inference_mode(), probed.computing():
            section(probed)
    except Exception:  # noqa: BLE001  (whatever it is, the next section runs)
        print(f"\nFAILED: {traceback.format_exc()}", flush=True)
        return False
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    return True


if __name__ == "__main__":
    main()

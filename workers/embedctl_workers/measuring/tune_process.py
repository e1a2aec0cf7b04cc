"""For `embedctl model tune`: one of some workers that share CPUs, and perhaps a GPU, measured by itself.

    python -m embedctl_workers.measuring.tune_process CLASS MODEL CPUS THREADS [GPU WORKERS]

The process prints a JSON object of facts when the model is loaded. Then each line on standard input is a number of
seconds to measure for, and the answer is a line with tokens/s; on CPUs, by CPU time. This is a separate process because
a process can't change its thread counts, and because several are measured at once.
"""

from __future__ import annotations

import json
import logging
import sys

from embedctl_config.errors import EmbedctlError
from embedctl_config.loading import load_settings
from embedctl_workers.machine import devices
from embedctl_workers.machine.discovery import choose_accelerator


def main() -> None:
    hardware, model, cpus, threads, *shared = sys.argv[1:]
    logging.basicConfig(format="%(message)s")
    try:
        settings = load_settings()
        entry = settings.hardware_class(hardware)
        accelerator, sharing = None, 1
        if shared:
            accelerator, sharing = choose_accelerator(hardware, entry.device, gpu=shared[0]), int(shared[1])
        pinned = devices.pin(cpus, accelerator=accelerator, threads=int(threads), sharing=sharing)
        # Imported only now, because these load libraries that size their thread pools at import.
        from embedctl_workers.encoding.known_good import load_encoder
        from embedctl_workers.machine.host import Host
        from embedctl_workers.measuring.rates import mixed_load, working_rate
        from embedctl_workers.models.cache import cache_folder

        host = Host(pinned.threads, cache_folder(settings), sharing=pinned.sharing, places=pinned.places)
        encoder = load_encoder(settings, entry, model, host)
        load, computing = mixed_load(encoder), 0 if accelerator else host.threads
        _say({"fingerprint": encoder.backend.fingerprint, "engine": encoder.backend.engine})
        for line in sys.stdin:
            _say(working_rate(encoder, load, float(line), threads=entry.prefetch, computing=computing))
    except EmbedctlError as error:
        sys.exit(str(error))


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

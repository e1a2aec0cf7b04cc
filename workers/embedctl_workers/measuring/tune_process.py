"""`python -m embedctl_workers.measuring.tune_process CLASS MODEL CPUS [THREADS GPU WORKERS]` for `embedctl model tune`.

The process prints a JSON object of facts when the model is loaded. Then each line on standard input is a question, and
the answer is a line with tokens/s. On CPUs, the question is a token budget. With a GPU, this is one of some workers
that share it, and the question is a number of seconds to measure for. This is a separate process because a process
can't change its thread counts, and because several may be measured at once.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from embedctl_config.errors import EmbedctlError
from embedctl_config.loading import load_settings
from embedctl_workers.machine import devices
from embedctl_workers.machine.discovery import choose_accelerator

if TYPE_CHECKING:
    from embedctl_workers.encoding.encoder import ChunkEncoder

#: Time per answer about a token budget (seconds); its last batch may exceed that.
_SECONDS = 2.0


def main() -> None:
    hardware, model, cpus, *shared = sys.argv[1:]
    logging.basicConfig(format="%(message)s")
    try:
        settings = load_settings()
        entry = settings.hardware_class(hardware)
        if shared:
            threads, gpu, workers = shared
            accelerator = choose_accelerator(hardware, entry.device, gpu=gpu)
            pinned = devices.pin(cpus, accelerator=accelerator, threads=int(threads), sharing=int(workers))
        else:
            pinned = devices.pin(cpus)
        # Imported only now, because these load libraries that size their thread pools at import.
        from embedctl_workers.encoding.loading import load_encoder
        from embedctl_workers.machine.host import Host
        from embedctl_workers.models.cache import cache_folder

        host = Host(pinned.threads, cache_folder(settings), sharing=pinned.sharing, places=pinned.places)
        encoder = load_encoder(settings, entry, model, host)
        rate = _working_rate(encoder, entry.prefetch) if shared else _rate_by_budget(encoder)
        backend = encoder.backend
        _say({"fingerprint": backend.fingerprint, "engine": backend.engine, "threads": pinned.threads})
        for line in sys.stdin:
            _say(rate(line))
    except EmbedctlError as error:
        sys.exit(str(error))


def _rate_by_budget(encoder: ChunkEncoder) -> Callable[[str], float]:
    """Answers with the rate of encoding the batches of a chunk, in the same order each time."""
    from embedctl_workers.encoding.encoder import ChunkEncoder
    from embedctl_workers.measuring.rates import encoding_rate, mixed_load

    def answer(token_budget: str) -> float:
        budgeted = ChunkEncoder(encoder.backend, int(token_budget))
        return encoding_rate(budgeted, mixed_load(budgeted), _SECONDS)

    return answer


def _working_rate(encoder: ChunkEncoder, threads: int) -> Callable[[str], float]:
    """Answers with the rate of tokenising and encoding."""
    from embedctl_workers.measuring.rates import mixed_load, working_rate

    load = mixed_load(encoder)
    return lambda seconds: working_rate(encoder, load, float(seconds), threads=threads)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

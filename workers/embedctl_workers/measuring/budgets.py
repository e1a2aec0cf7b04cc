"""`python -m embedctl_workers.measuring.budgets CLASS MODEL CPUS`: speed by token budget, for `embedctl model tune`.

The process prints a JSON object of facts when the model is loaded. Then each line on standard input is a token budget,
and the answer is a line with tokens/s. This is a separate process because a process can't change its thread counts, and
because several may be measured at once.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING

from embedctl_config.errors import EmbedctlError
from embedctl_config.loading import load_settings
from embedctl_workers.machine import devices

if TYPE_CHECKING:
    from embedctl_workers.backends.base import Backend

#: Time per answer (seconds); its last batch may exceed that.
SECONDS = 2.0


def main() -> None:
    """Run the command line."""
    hardware, model, cpus = sys.argv[1:]
    logging.basicConfig(format="%(message)s")
    try:
        settings = load_settings()
        pinned = devices.pin(cpus)
        # Imported only now, because these load libraries that size their thread pools at import.
        from embedctl_workers.encoding.loading import load_encoder
        from embedctl_workers.machine.host import Host
        from embedctl_workers.models.cache import cache_folder

        host = Host(pinned.threads, cache_folder(settings), places=pinned.places)
        backend = load_encoder(settings, settings.hardware_class(hardware), model, host).backend
        _say({"fingerprint": backend.fingerprint, "engine": backend.engine, "threads": pinned.threads})
        for line in sys.stdin:
            _say(_tokens_per_s(backend, int(line)))
    except EmbedctlError as error:
        sys.exit(str(error))


def _tokens_per_s(backend: Backend, token_budget: int) -> float:
    """The rate of encoding the batches of a chunk, in the same order each time, until the time is over."""
    from embedctl_workers.encoding.encoder import ChunkEncoder
    from embedctl_workers.measuring.rates import encoding_rate, mixed_load

    encoder = ChunkEncoder(backend, token_budget)
    return encoding_rate(encoder, mixed_load(encoder), SECONDS)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

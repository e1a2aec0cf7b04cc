"""Our servers: the gateway with a worker and a private Redis, and the same engine in the server's process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embedctl_workers.machine.devices import SPIN_VARIABLE, SPINS

from .embedctl_pipeline import configuration, product
from .http_client import HttpAdapter


class GatewayAdapter(HttpAdapter):
    """`embedctl gateway` beside a worker, as `embedctl up --gateway` runs them, on all CPUs together."""

    def __init__(
        self, model: Path, threads: int, chunk: int, cache: str, hardware: str, entry: Mapping[str, Any]
    ) -> None:
        with ExitStack() as stack:
            settings = product(stack, configuration(model, cache, hardware, entry), chunk, workers=1)
            variables = {"EMBEDCTL_REDIS_URL": settings.redis_url, "EMBEDCTL_HARDWARE": hardware}
            variables["EMBEDCTL_GATEWAY_TIMEOUT_S"] = "600"  # on few CPUs, large requests take longer than a minute
            super().__init__(model, [sys.executable, "-m", "embedctl_gateway", "--address", "0"], variables)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the gateway, the worker and the Redis."""
        super().close()
        self._stack.close()


class DirectAdapter(HttpAdapter):
    """The engine behind HTTP, without a queue."""

    def __init__(self, model: Path, threads: int, **options: Any) -> None:
        facts = json.dumps([str(model), {"threads": threads, **options}])
        command = [sys.executable, "-m", f"{__package__}.http_direct", facts]
        super().__init__(model, command, {SPIN_VARIABLE: SPINS})  # as a worker has it

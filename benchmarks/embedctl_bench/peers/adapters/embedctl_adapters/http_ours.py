"""Our servers: the gateway with a worker and a private Redis, and the same engine in the server's process."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embedctl_workers.machine.devices import SPIN_VARIABLE, SPINS

from .embedctl_pipeline import product
from .http_client import HttpAdapter


class GatewayAdapter(HttpAdapter):
    """`embedctl gateway` beside a worker, as `embedctl up --gateway` runs them, on all CPUs together."""

    def __init__(
        self, model: Path, threads: int, chunk: int, cache: str, hardware: str, entry: Mapping[str, Any]
    ) -> None:
        self._stack = ExitStack()
        settings, folder = product(self._stack, model, 1, cache, chunk, hardware, entry)
        variables = {"EMBEDCTL_REDIS_URL": settings.redis_url, "EMBEDCTL_HARDWARE": hardware}
        variables["EMBEDCTL_GATEWAY_TIMEOUT_S"] = "600"  # on few CPUs, large requests take longer than a minute
        command = [sys.executable, "-m", "embedctl_gateway", "--address", "0"]
        try:
            super().__init__(model, command, folder / "gateway.log", variables)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """End the gateway, the worker and the Redis."""
        super().close()
        self._stack.close()


class DirectAdapter(HttpAdapter):
    """The engine behind HTTP, without a queue."""

    def __init__(self, model: Path, threads: int, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="embedctl-bench-")
        facts = json.dumps([str(model), {"threads": threads, **options}])
        command = [sys.executable, "-m", f"{__package__}.http_direct", facts]
        log = Path(self._folder.name) / "direct.log"
        super().__init__(model, command, log, {SPIN_VARIABLE: SPINS})  # as a worker has it

    def close(self) -> None:
        """End the server, and remove its log."""
        super().close()
        self._folder.cleanup()

"""infinity's own server at its defaults, on torch; without BetterTransformer, which its transformers lack."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

from .http_client import HttpAdapter


class InfinityServerAdapter(HttpAdapter):
    """`infinity_emb v2`; its log is told if it does not start."""

    def __init__(self, model: Path, threads: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        command = [str(Path(sys.executable).with_name("infinity_emb")), "v2", "--model-id", str(model)]
        command += ["--served-model-name", model.name, "--engine", "torch", "--device", "cpu", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--no-bettertransformer", "--url-prefix", "/v1"]
        self._folder = tempfile.TemporaryDirectory(prefix="embedctl-bench-")
        variables = {"INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1"}
        log = Path(self._folder.name) / "infinity.log"
        super().__init__(model, command, log, variables, f"http://127.0.0.1:{port}")

    def close(self) -> None:
        """End the server, and remove its log."""
        super().close()
        self._folder.cleanup()

"""What TensorRT measured of its kernels on a kind of GPU, so that the next plan is built faster."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from embedctl_workers.backends.tensorrt.runtime import Runtime
from embedctl_workers.models.cache import distrusted, keep

log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


class TimingCache:
    """The file of one version of TensorRT and one kind of GPU. Its first bytes are the sha256 of the others."""

    def __init__(self, runtime: Runtime, cache: Path) -> None:
        facts = json.dumps([runtime.version, runtime.device.name, runtime.device.capability])
        self.path = cache / "tensorrt" / f"timing-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"

    def read(self) -> bytes:
        """What was kept; empty where there is nothing that can be trusted."""
        try:
            if wrong := distrusted(self.path):
                log.warning("%s is not read, for it is not trusted: %s", self.path, wrong)
                return b""
            content = self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("not read: %s", error)
            return b""
        digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(kept).digest() == digest:
            return kept
        log.warning("%s is damaged and is made again", self.path)
        return b""

    def write(self, kept: bytes) -> None:
        """Replace it. Of two that build at once, what the last one measured stays.

        Raises:
            ModelError: others may write to its folder.
            OSError: it can't be written.
        """
        keep(self.path, hashlib.sha256(kept).digest() + kept)

"""TensorRT's timing cache: its measurements of kernels on one kind of GPU, which make the next build faster."""

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
    """The file for one version of TensorRT and one kind of GPU. Its first bytes are the sha256 of the rest."""

    def __init__(self, runtime: Runtime, cache: Path) -> None:
        facts = json.dumps([runtime.version, runtime.device.name, runtime.device.capability])
        self.path = cache / "tensorrt" / f"timing-{hashlib.sha256(facts.encode()).hexdigest()[:32]}"

    def read(self) -> bytes:
        """The kept measurements; empty if there are none that can be trusted."""
        try:
            if wrong := distrusted(self.path):
                log.warning("%s is not read, because it is not trusted: %s", self.path, wrong)
                return b""
            content = self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("the timing cache can't be read: %s", error)
            return b""
        digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(kept).digest() == digest:
            return kept
        log.warning("%s is damaged, and is made again", self.path)
        return b""

    def write(self, kept: bytes) -> None:
        """Replace the kept measurements; of two builds at once, the last one's stay. Raises as :func:`keep`."""
        keep(self.path, hashlib.sha256(kept).digest() + kept)

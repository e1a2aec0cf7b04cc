"""Other files of the dummy model. Their vectors are the same, so that those of any job are known."""

from __future__ import annotations

import hashlib
from typing import Any

from embedctl_workers.backends.dummy import DummyBackend


class OtherBackend(DummyBackend):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fingerprint = hashlib.sha256(self.fingerprint.encode()).hexdigest()

"""The requests of `embedctl bench request` in files, and the measurement of one system with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedctl_bench.measuring.contenders import Contender, Ground
from embedctl_bench.measuring.distance import distance
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Vectors
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.registry import System
from embedctl_bench.request.results import QUICK, RequestRun, RequestShape, RequestSystem
from embedctl_bench.request.texts import REQUESTS, request_texts


@dataclass(frozen=True, slots=True)
class RequestGround(Ground):
    """What all systems have in common on one model.

    Attributes:
        checked: the first texts of each request, which have references.
    """

    checked: RequestShape

    def requests(self, shape: RequestShape) -> Path:
        """The file of requests of a shape."""
        texts = [request_texts(number, count) for number, count in enumerate(shape.sizes)]
        return kept(texts, self.place, f"requests-{shape.name}")

    def contender(self, system: System) -> Contender[RequestSystem]:
        """A system that has not run yet."""
        return Contender(
            system,
            RequestSystem.of(system),
            self,
            lambda process: process.requests(self.requests(QUICK)),
            request=self.checked.texts // REQUESTS,
        )

    def run(self, contender: Contender[RequestSystem], shape: RequestShape) -> dict[str, Any]:
        """Make the requests of a shape, all at once; a :class:`RequestRun` as JSON.

        Raises:
            Unavailable: it failed.
        """
        done = contender.process().requests(self.requests(shape))
        figures = self.compare(done.vectors, shape)
        run = RequestRun(
            seconds=done.seconds, tokens=done.tokens, fetched=done.fetched, latencies=done.latencies, **figures
        )
        return run.to_json()

    def compare(self, vectors: Vectors, shape: RequestShape) -> dict[str, float]:
        """How far the vectors of requests of a shape are from their references.

        Raises:
            Unavailable: there are more or fewer vectors than texts, or they have another size.
        """
        if vectors.shape != (shape.texts, self.reference.shape[1]):
            raise Unavailable(f"vectors of shape {vectors.shape} for {shape.texts} texts")
        rows: list[int] = []
        first = 0
        for size, count in zip(shape.sizes, self.checked.sizes, strict=True):
            rows += range(first, first + min(size, count))
            first += size
        return distance(vectors[rows], self.reference)


def kept(texts: Sequence[Any], place: Path, name: str) -> Path:
    """A file with these texts, as JSON."""
    text = json.dumps(texts)
    path = place / "workloads" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    return path

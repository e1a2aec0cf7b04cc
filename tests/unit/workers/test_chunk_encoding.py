"""Chunks of several threads on one device, as a worker's watchdog sees them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

from embedctl_workers.arrays.tokens import Rows, Tokens, Vectors
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.serving.chunk_encoding import ChunkEncoding, SharedDevice
from embedctl_workers.serving.claimed import ClaimedChunk
from embedctl_workers.serving.in_hand import Held, InHand
from embedctl_workers.serving.isolation import Isolation
from embedctl_workers.serving.telemetry import Telemetry
from tests.support.chunks import chunk_of

BATCH_S = 0.02


class Device(DummyBackend):
    """A dummy that joins batches, each of which takes the same time by a clock that stands still between them.

    Attributes:
        quiet_s: for how long the quietest chunk had made no progress at the end of any batch.
    """

    def __init__(self) -> None:
        super().__init__(dim=4, poison=True, seconds_per_batch=BATCH_S)
        self.joins = self.budget_by_sum = True
        self.ahead = 1
        self.clock_s = self.quiet_s = 0.0
        self.in_hand = InHand(now=lambda: self.clock_s)

    def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
        self.clock_s += BATCH_S
        if found := self.in_hand.quietest():
            self.quiet_s = max(self.quiet_s, found[1])
        return super().forward(tokens, rows)


def encoding_with(in_hand: InHand, hurrying: threading.Event | None = None) -> ChunkEncoding:
    device = SharedDevice(in_hand, Telemetry(), threading.Event(), hurrying or threading.Event(), now_ms=lambda: 1)
    return ChunkEncoding(["m"], cast(Any, None), device, Isolation())


def test_in_a_hurry_a_chunk_is_left_between_two_batches() -> None:
    hurrying, batches = threading.Event(), 0

    class Hurried(DummyBackend):
        def forward(self, tokens: Tokens, rows: Rows) -> Vectors:
            nonlocal batches
            batches += 1
            hurrying.set()
            return super().forward(tokens, rows)

    encoding = encoding_with(InHand(), hurrying)
    held = Held("job", 0, "token", "m")
    job = cast(Any, SimpleNamespace(options={}))
    encoder = ChunkEncoder(Hurried(dim=4), 64)
    chunk = chunk_of(*(f"word{row} and another" for row in range(200)))
    assert encoding.encode(ClaimedChunk(held, job, encoder, b"", chunk, None)) is None
    assert batches == 1


def test_a_chunk_that_waits_while_another_finds_its_bad_records_is_not_quiet() -> None:
    """The other has the device for 1.5 s, and finishes a part every 20 ms; this chunk has begun before that."""
    device = Device()
    encoder, in_hand = ChunkEncoder(device, 64), device.in_hand
    encoding = encoding_with(in_hand)

    def encode(number: int, texts: list[str]) -> Any:
        held = Held("job", number, str(number), "m")
        in_hand.take(held)
        try:
            return encoding.encode(
                ClaimedChunk(held, cast(Any, SimpleNamespace(options={})), encoder, b"", chunk_of(*texts), None)
            )
        finally:
            in_hand.drop(held)

    with ThreadPoolExecutor(2) as threads:
        bad = threads.submit(encode, 0, [f"a{row} fail-encoder" for row in range(24)])
        long = threads.submit(encode, 1, [f"w{row} b" for row in range(800)])
        assert len(bad.result().errors) == 24
        assert not long.result().errors
    assert device.clock_s > 1.0
    assert device.quiet_s < 0.5

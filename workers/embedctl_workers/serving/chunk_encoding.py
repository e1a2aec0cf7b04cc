"""Encodes claimed chunks on the device that the task threads share: beside others, record by record, or alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import cast

from embedctl.store import Doubts
from embedctl_config.errors import DeviceLost
from embedctl_workers.arrays.tokens import Found
from embedctl_workers.backends.base import Backend, WarmsThreads
from embedctl_workers.encoding.careful import CarefulUse, encode_carefully
from embedctl_workers.encoding.encoder import NOT_OF_A_RECORD, ChunkEncoder, EncodedChunk
from embedctl_workers.encoding.joining import Launcher
from embedctl_workers.encoding.prepared import DeviceUse, Prepared, Stopped
from embedctl_workers.redaction import first_line, redacted_exc_info
from embedctl_workers.serving.chunk_store import ChunkStore
from embedctl_workers.serving.claimed import ClaimedChunk
from embedctl_workers.serving.in_hand import Held, InHand, Isolation
from embedctl_workers.serving.speed import SpeedMeter, Work
from embedctl_workers.serving.telemetry import Telemetry

log = logging.getLogger(__name__)


class ChunkEncoding:
    """Encodes chunks for several threads, each inside the isolation: one is on the device while others prepare theirs.

    `speed` is by model.
    """

    def __init__(self, models: Iterable[str], store: ChunkStore, device: SharedDevice, isolation: Isolation) -> None:
        self._store = store
        self._isolation = isolation
        self._telemetry = device.telemetry
        self._device = device
        self._launcher = Launcher(device.lock)
        self._meter = SpeedMeter(models)
        self.speed = self._meter.speed

    def warm_up(self, backends: Iterable[Backend]) -> None:
        """Do the one-time work of the thread that begins joined batches."""
        for backend in backends:
            if backend.joins and isinstance(backend, WarmsThreads):
                try:
                    self._launcher.warm_up(backend)
                except Exception as error:  # noqa: BLE001  (chunks may still be encoded, or tell what is wrong)
                    log.warning("the thread that begins batches is not warmed up: %s", first_line(error))

    def wait_for_device(self) -> None:
        """Wait until no thread uses the device; the next moment, one may."""
        with self._device.lock:
            pass

    def encode_together(self, chunks: Sequence[ClaimedChunk]) -> list[Share | None]:
        """Encode chunks of one encoder in common batches; each one's share for :meth:`encode`, None: encode it by
        itself.
        """
        prepared = [self._prepared_to_join(each) for each in chunks]
        key = next((each.key for each in prepared if each), None)
        joined = [at for at, each in enumerate(prepared) if each and each.key is not None and each.key == key]
        shares: list[Share | None] = [Share(each, None) if each else None for each in prepared]
        if len(joined) < 2:
            return shares
        use = _CommonTurn(self._device, [chunks[at].held for at in joined])
        together = [each for at in joined if (each := prepared[at])]
        try:
            vectors = chunks[joined[0]].encoder.encode_together(together, use)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  (each chunk finds out by itself what is to blame)
            if not isinstance(error, Stopped):
                log.warning("a batch of %d chunks failed (%s): trying each alone", len(joined), type(error).__name__)
            return shares
        finally:
            use.end()
        self._note_common(chunks[joined[0]], together, use)
        for at, found in zip(joined, vectors, strict=True):
            shares[at] = Share(cast(Prepared, prepared[at]), found)
        return shares

    def _prepared_to_join(self, claimed: ClaimedChunk) -> Prepared | None:
        """A prepared chunk; None if that fails, so that it fails once more by itself."""
        try:
            return self._prepare(claimed)
        except Exception as error:  # noqa: BLE001  (raised again when it is encoded by itself)
            log.info("the chunk is not joined to others (%s)", type(error).__name__, extra=claimed.held.fields)
            return None

    def _note_common(self, first: ClaimedChunk, together: Sequence[Prepared], use: _CommonTurn) -> None:
        now, backend = self._device.in_hand.now(), first.encoder.backend
        lengths = [each.tokens.lengths[rows] for each in together for rows in each.batches]
        work = Work(
            sum(each.rows for each in together),
            sum(int(each.sum()) for each in lengths),
            sum(backend.positions(each) for each in lengths),
        )
        for _ in together:  # each of them took that time
            self._telemetry.staged(first.held.model, "encode", now - use.began)
        self._meter.encoded(first.held.model, work, began=use.began, ended=now)

    def encode(self, claimed: ClaimedChunk, share: Share | None = None) -> EncodedChunk | None:
        """Encode a chunk; None if the worker is to stop first, or another suspect chunk is encoded alone.

        Raises:
            Stopped: the chunk is no longer wanted.
            DeviceLost, WorkerSick: as by :meth:`ChunkEncoder.encode`.
            BrokerUnavailable: a suspect chunk's lease can't be renewed.
            Exception: the chunk fails even record by record.
        """
        try:
            return self._encode_alone(claimed) if claimed.is_suspect else self._encode_beside_others(claimed, share)
        except _Draining:
            return None
        finally:
            claimed.held.moving_since, claimed.held.on_device = None, False

    def check_worker(self, encoder: ChunkEncoder) -> None:
        """Check that the worker still encodes its known good text, as :meth:`ChunkEncoder.check_worker`."""
        with self._device.lock:
            encoder.check_worker()

    def _encode_beside_others(self, claimed: ClaimedChunk, share: Share | None) -> EncodedChunk:
        try:
            if share is not None and share.vectors is not None:
                use = _TurnsByRecord(self._device, claimed.held)
                use.check_wanted()
                return claimed.encoder.encode(share.prepared, use, vectors=share.vectors)
            return self._encode_at_once(claimed, share.prepared if share else self._prepare(claimed))
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:
            log.warning(
                "the chunk failed as a whole (%s): encoding it record by record",
                type(error).__name__,
                exc_info=redacted_exc_info(error),
                extra=claimed.held.fields,
            )
            self._telemetry.failed(claimed.held.model)
        return self._encode_record_by_record(claimed)

    def _prepare(self, claimed: ClaimedChunk) -> Prepared:
        held = claimed.held
        began = held.moving_since = self._device.in_hand.now()  # a tokeniser may hang as well
        try:
            prepared = claimed.encoder.prepare(claimed.chunk, claimed.job.options, about=held.fields)
        finally:
            held.moving_since = None
        self._telemetry.staged(held.model, "tokenise", self._device.in_hand.now() - began)
        return prepared

    def _encode_at_once(self, claimed: ClaimedChunk, prepared: Prepared) -> EncodedChunk:
        held, use = claimed.held, _OneTurn(self._device, claimed.held)
        encoded = claimed.encoder.encode(prepared, use, self._launcher)
        now = self._device.in_hand.now()
        self._telemetry.staged(held.model, "encode", now - use.began if use.began else 0.0)
        self._meter.encoded(
            held.model, Work(prepared.rows, encoded.tokens, encoded.positions), began=use.began, ended=now
        )
        return encoded

    def _encode_record_by_record(self, claimed: ClaimedChunk) -> EncodedChunk:
        """Encode a chunk that fails as a whole, so that only the records to blame fail."""
        claimed.held.on_device = False  # a record is tokenised before its turn, and only then is it on the device
        return self._encode_carefully(claimed, _TurnsByRecord(self._device, claimed.held))

    def _encode_alone(self, claimed: ClaimedChunk) -> EncodedChunk | None:
        """Encode a suspect chunk with nothing else in this process; None if another suspect chunk is."""
        if not self._isolation.isolate():
            return None
        about = claimed.held.fields
        log.warning("workers died or fell sick over the chunk: encoding it alone, record by record", extra=about)
        return self._encode_carefully(claimed, _AloneUse(self._device, claimed, self._store))

    def _encode_carefully(self, claimed: ClaimedChunk, use: CarefulUse) -> EncodedChunk:
        return encode_carefully(claimed.encoder, claimed.chunk, claimed.job.options, use, about=claimed.held.fields)


@dataclass(frozen=True, slots=True)
class Share:
    """A chunk's share of common batches; vectors are None if the batches failed, or the chunk was in none."""

    prepared: Prepared
    vectors: Found | None


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """The device of this process, and who is told of its progress.

    Once `draining` is set, no encode begins; once `hurrying` is, no further batch. `now_ms` is about the time of Redis,
    in ms.
    """

    in_hand: InHand
    telemetry: Telemetry
    draining: threading.Event
    hurrying: threading.Event
    now_ms: Callable[[], int]
    lock: threading.Lock = field(default_factory=threading.Lock)


class _HeldUse(DeviceUse):
    """The use of the device by a held chunk."""

    def __init__(self, device: SharedDevice, held: Held) -> None:
        self._device, self._held = device, held

    def check_wanted(self) -> None:
        if self._held.unwanted.is_set():
            raise Stopped

    def on_batch(self, tokens: int) -> None:
        self._device.in_hand.progressed(self._held, self._device.now_ms())

    def _begin(self) -> float:
        """Note the time, unless the worker is to stop."""
        if self._device.draining.is_set():
            raise _Draining
        now = self._held.moving_since = self._device.in_hand.now()
        return now


class _OneTurn(_HeldUse):
    """The use by a chunk that is finished once it has begun, unless the worker is to stop in a hurry.

    `began` is when its first batch began, by the monotonic clock; 0 before that.
    """

    def __init__(self, device: SharedDevice, held: Held) -> None:
        super().__init__(device, held)
        self.began = self._batch_began = 0.0

    def turn(self) -> AbstractContextManager[object]:
        return self._device.lock

    def check_wanted(self) -> None:
        if not self.began:
            self.began = self._batch_began = self._begin()
            self._held.on_device = True
        if self._device.hurrying.is_set():
            raise _Draining
        super().check_wanted()

    def on_batch(self, tokens: int) -> None:
        before, self._batch_began = self._batch_began, self._device.in_hand.now()
        self._device.telemetry.batched(self._held.model, self._batch_began - before)
        super().on_batch(tokens)


class _CommonTurn(_OneTurn):
    """The use by several chunks that share batches; it ends early only if none of them is wanted."""

    def __init__(self, device: SharedDevice, chunks: Sequence[Held]) -> None:
        super().__init__(device, chunks[0])
        self._chunks = chunks

    def check_wanted(self) -> None:
        if not self.began:
            self.began = self._batch_began = self._begin()
            for held in self._chunks:
                held.on_device, held.moving_since = True, self.began
        if all(held.unwanted.is_set() for held in self._chunks):
            raise Stopped

    def end(self) -> None:
        """No chunk is on the device any more."""
        for held in self._chunks:
            held.moving_since, held.on_device = None, False


class _TurnsByRecord(_HeldUse, CarefulUse):
    """The use by a chunk whose records take turns; it ends between two records if the worker is to stop."""

    def announce(self, row: int) -> None:
        self.check_wanted()
        self._held.moving_since = self._device.in_hand.now()

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._held.moving_since = None  # others may have the device for long
        with self._device.lock:
            self._begin()
            yield


class _AloneUse(_HeldUse, CarefulUse):
    """The use by a suspect chunk that is alone in this process; its lease tells Redis which record it has come to."""

    def __init__(self, device: SharedDevice, claimed: ClaimedChunk, store: ChunkStore) -> None:
        super().__init__(device, claimed.held)
        self._store, self._encoder = store, claimed.encoder
        doubts = claimed.held.doubts or Doubts()
        self._is_suspect = doubts.is_suspect
        self.given_up, self.poisonous = claimed.given_up or (), doubts.poisonous
        # If a worker falls sick after a number of rows, whichever they are, another row is named then.
        self.first = doubts.named

    def announce(self, row: int) -> None:
        self.check_wanted()
        if self._device.draining.is_set() and row >= 0:
            raise _Draining
        self._held.moving_since = None
        if self._store.renew(self._held, row) != "ok":
            raise Stopped
        self._held.row = row if self._is_suspect and row >= 0 else None  # else nothing was checked before it
        self._held.moving_since = self._device.in_hand.now()

    def check(self) -> None:
        if self._is_suspect:
            self._encoder.check_worker()


class _Draining(Stopped):
    """Raised before a chunk, between two records, or in a hurry between two batches, when the worker is to stop."""

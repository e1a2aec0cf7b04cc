"""Brings a job's vectors to a database, each under its record's id."""

from __future__ import annotations

from contextlib import suppress

from embedctl.destinations.answers import is_of_batch
from embedctl.destinations.ids import LeftOut, decided
from embedctl.destinations.interface import Destination
from embedctl.destinations.loop import Callbacks, Delivered, Taker, Written, run
from embedctl.destinations.reader import ResultReader
from embedctl.destinations.release import is_released, release
from embedctl.destinations.released import refuse_database
from embedctl.destinations.rows import Options, Rows
from embedctl.queueing.retrying import TimeLimit
from embedctl.waiting.results import ChunkVectors
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import JobError, OutputError, SettingsError


def deliver(waiter: Waiter, destination: Destination, options: Options, callbacks: Callbacks) -> Delivered:
    """Bring a job's records to a destination, and wait for those that are not there yet; arguments and errors are those
    of :meth:`Job.deliver`. Failed records are left out. If this dies, the same call resumes. Memory holds a batch."""
    status = waiter.status()
    if is_of_batch(status):
        raise SettingsError(f"job {status.id} was made of a batch file: it is answered in a .jsonl, which -o names")
    if is_released(waiter, status, destination, options):
        return release(waiter, destination, options, callbacks)
    refuse_database(waiter.broker.drains, status.id, waiter.broker.drains.state(status.id))
    reader = ResultReader(waiter)
    left_out = None
    if not options.knows_ids:
        # Only at the job's end, all ids are known.
        records = waiter.until_ended(TimeLimit.from_now(None), callbacks.progress).records
        left_out = decided(reader.heads(callbacks.progress), records, options.duplicates)
    rows = Rows(waiter, destination, options, left_out, callbacks.refused)
    delivery = _Delivery(rows, left_out, callbacks.written)
    try:
        run(lambda: reader.chunks(progress=callbacks.progress), delivery, waiter.status)
    finally:
        with suppress(OutputError):  # the delivery has closed it, if it came to its end
            destination.close()
    return delivery.done


class _Delivery(Taker[ChunkVectors]):
    def __init__(self, rows: Rows, left_out: LeftOut | None, written: Written) -> None:
        self._rows, self._written = rows, written
        self.done = rows.done
        self.done.left_out = 0 if left_out is None else left_out.count

    def take(self, chunk: ChunkVectors) -> None:
        self.done.failed += len(chunk.errors)
        self._rows.add(chunk)
        if self._rows.is_full:
            self._flush()

    def _flush(self) -> None:
        for chunk in self._rows.flush():
            self._written(chunk)

    def end(self) -> None:
        self._flush()
        self._rows.refuse_missing()

    def close(self) -> None:
        self._rows.close()

    def cut_short(self, error: JobError) -> None:
        """What is done is delivered, also if nothing more comes."""
        self.end()
        self.close()

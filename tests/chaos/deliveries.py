"""Deliveries of jobs into a database: killed while the job runs, repeated when all is over, and counted.

`python -m tests.chaos.deliveries JOB`: deliver a job in small batches.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from embedctl import Job
from embedctl.cli import main
from embedctl_config import keys
from tests.chaos.fault import Chaos, Struck, killed_later
from tests.chaos.stack import FAR, Stack

#: A delivery is killed after so long (seconds): first it imports the database, then it writes.
_KILLED_S = (1.5, 9.0)
#: A delivery that nobody kills ends within this time (seconds).
_DELIVERED_S = 60.0
_FOLDER = "tables"
_BATCH_RECORDS = 50
#: Lengthens a job's lifetime unless Redis forgot the job: its table is counted at the end, however long the run is.
_KEEP = "return redis.call('EXISTS', KEYS[1]) == 1 and redis.call('HSET', KEYS[1], 'ttl_ms', ARGV[1])"


def kill_delivery(chaos: Chaos) -> Struck | None:
    """Deliver a job that runs, and kill that. The next strike at the same job goes on."""
    orders = [
        each
        for each in chaos.producers.orders
        if each.job_id and not (each.ended or each.plan.frees_key or each.job_id in chaos.drained)
    ]
    if not orders or find_spec("lancedb") is None:
        return None
    order = chaos.rng.choice(orders)
    job_id = str(order.job_id)
    chaos.stack.raw.eval(_KEEP, 1, keys.job(job_id), keys.UNENDED_TTL_S * 1000)
    chaos.delivered.add(job_id)
    delivery = _started(chaos.stack, job_id)
    return killed_later(delivery, f"of job {order.plan.index}", chaos.rng.uniform(*_KILLED_S))


def miscounted(chaos: Chaos) -> list[str]:
    """Repeat the deliveries of all jobs that Redis still keeps, discard them, and return which tables do not hold each
    vector once."""
    if not chaos.delivered:
        return []
    from lancedb import connect  # here, because it starts a thread, and is not installed everywhere

    found = []
    kept = [name for name in chaos.delivered if chaos.stack.raw.pttl(keys.job(name)) > 1000 * _DELIVERED_S]
    for status in chaos.stack.broker.jobs.find(sorted(kept)):
        # What stopped a job decided by chance how much of it is done, and after a rewind once more.
        if status.state.ended and status.stopped_by is None and status.done:
            exit_status = _started(chaos.stack, status.id).wait(_DELIVERED_S)
            ids = connect(chaos.stack.folder / _FOLDER).open_table(status.id).to_arrow()["id"].to_pylist()
            found.append((status, len(ids), len(set(ids)), exit_status))
        Job(status.id, chaos.stack.broker).discard()
    chaos.notes.append(f"{len(found)} tables of {len(chaos.delivered)} killed deliveries were counted at the end")
    return [
        f"the table of {status.id} has {rows} rows and {ids} ids for {status.done} vectors (status {exit_status})"
        for status, rows, ids, exit_status in found
        if not rows == ids == status.done
    ]


def _started(stack: Stack, job_id: str) -> subprocess.Popen[bytes]:
    log_file = stack.folder / "deliveries.log"
    return stack.spawn(["tests.chaos.deliveries", job_id], log_file=log_file, link=FAR)


if __name__ == "__main__":
    from embedctl.destinations.lancedb import LanceTable

    LanceTable.batch_records = _BATCH_RECORDS
    (_, job) = sys.argv
    main(["fetch", job, "-o", f"lancedb:{_FOLDER}?table={job}", "--duplicates", "position", "-q"], prog_name="embedctl")

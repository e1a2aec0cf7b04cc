"""A Celery application of somebody else in the same database, with the keys that Celery uses by default:
`python -m tests.chaos.foreign` sends tasks and works on them."""

from __future__ import annotations

import os
import time

from celery import Celery

from tests.chaos.fault import Chaos, Struck, killed_later

_TASKS, _TASK_S = 20, 0.2

app = Celery("foreign", broker=os.environ.get("EMBEDCTL_REDIS_URL"))
# It gives back what killed workers had, as soon as it can.
app.conf.update(task_acks_late=True, broker_transport_options={"visibility_timeout": 1})


@app.task
def rest() -> None:
    time.sleep(_TASK_S)  # its work: its worker is killed in the middle of it


def start_foreigner(chaos: Chaos) -> Struck | None:
    """Let another application work in our database, and kill it."""
    if chaos.stack.site is not None:
        return None
    process = chaos.stack.spawn(["tests.chaos.foreign"], log_file=chaos.stack.folder / "foreign.log")
    seconds = chaos.rng.uniform(3.0, 12.0)
    return killed_later(process, f"for {seconds:.0f} s", seconds)


if __name__ == "__main__":
    for _ in range(_TASKS):
        rest.delay()
    app.worker_main(["worker", "--pool", "solo", "--without-mingle", "--without-gossip"])

"""A worker with other files of the dummy model than all others, on a machine whose clock is a day fast:
`python -m tests.chaos.other_worker` in place of `embedctl_workers`."""

from __future__ import annotations

import time
from unittest.mock import patch

_FAST_S = 24 * 3600


def _with_a_fast_clock() -> None:
    real, real_ns = time.time, time.time_ns
    patch.object(time, "time", lambda: real() + _FAST_S).start()
    patch.object(time, "time_ns", lambda: real_ns() + _FAST_S * 10**9).start()


if __name__ == "__main__":
    _with_a_fast_clock()  # before anything else is imported
    from embedctl_workers.backends import BACKENDS
    from embedctl_workers.commands.worker import main

    BACKENDS["dummy"] = ("tests.chaos.other_files:OtherBackend", "")
    main(prog_name="embedctl worker")

"""Runs commands in the Python that runs this file: an environment that may hold no more than embedctl's bare role.

Each line of standard input is a command, `{"arguments": […], "environment": {…}}`; each line of standard output says
how it ended, `{"status": 0, "out": "…", "err": "…"}`. A command runs in a fork, so embedctl is imported once for all,
and one that becomes another program runs that in the fork too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from embedctl.cli import main


def _run(arguments: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> None:
    """What a fork does."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.update(environment)
    os.execv = _become  # type: ignore[assignment]  # it returns nothing either
    sys.argv = ["embedctl", *arguments]
    main(prog_name="embedctl")


def _become(path: str, arguments: Sequence[str]) -> None:
    from embedctl_workers.machine import devices

    # NumPy is imported already, which no worker may find; no command here gets as far as a model.
    devices._SIZES_THREADS_AT_IMPORT = ()  # type: ignore[assignment]  # mypy takes the four names for its type
    sys.argv = [path, *arguments[3:]]
    runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    sys.exit(0)


def _tried(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        fork = multiprocessing.get_context("fork").Process(
            target=_run, args=(arguments, environment, out.fileno(), err.fileno())
        )
        fork.start()
        fork.join()
        out.seek(0)
        err.seek(0)
        return {"status": fork.exitcode, "out": out.read(), "err": err.read()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_tried(**json.loads(line))), flush=True)

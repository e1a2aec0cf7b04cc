"""A worker as `embedctl worker` starts it, which also knows the backend `stand-in`.

With a folder in the variable :data:`PROFILE`, a thread samples what the worker's threads do while `FOLDER/on` exists.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from embedctl_workers.backends import BACKENDS
from embedctl_workers.commands.worker import main as run_worker

PROFILE = "STAND_IN_PROFILE"
_EVERY_S, _REST_S = 0.007, 0.05
#: How many of CPython's words are searched for the thread that holds the GIL.
_WORDS = 1024
_OURS = ("embedctl", "benchmarks")


def main() -> None:
    """Run the command line."""
    BACKENDS["stand-in"] = ("benchmarks.ours.stand_in:StandInBackend", "")
    if folder := os.environ.get(PROFILE):
        threading.Thread(target=_sample, args=(Path(folder),), name="sampler", daemon=True).start()
    run_worker(prog_name="embedctl worker")


def _sample(folder: Path) -> None:
    """Write `where.json` each time that `on` appears, and `samples.json` each time that it is gone."""
    on = folder / "on"
    while True:
        while not on.exists():
            time.sleep(_REST_S)
        _write(folder / "where.json", {"gil": _words_of_the_gil(), "holders": _threads(), "threads": _native_names()})
        samples: Counter[tuple[str, str]] = Counter()
        while on.exists():
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                samples[(names.get(ident, "?"), _place(frame))] += 1
            time.sleep(_EVERY_S)
        _write(folder / "samples.json", [[*key, count] for key, count in samples.most_common()])


def _place(frame: FrameType | None) -> str:
    """The innermost function, and the innermost one of embedctl's that it was called from."""
    leaf = found = _name(frame) if frame else ""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_OURS):
            found = _name(frame)
            break
        frame = frame.f_back
    return leaf if leaf == found else f"{found} → {leaf}"


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"


def _native_names() -> dict[str, str]:
    """Thread names by the kernel's ids."""
    return {str(thread.native_id): thread.name for thread in threading.enumerate()}


def _words_of_the_gil() -> list[int]:
    """Addresses in CPython's global state that hold this thread's state, one of them because it holds the GIL.

    From Python 3.12 on, there is none.
    """
    base = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    words = (ctypes.c_uint64 * _WORDS).from_address(base)
    here = _state()
    return [base + 8 * at for at, word in enumerate(words) if word == here]


def _threads() -> dict[str, str]:
    """Thread names by the addresses of their states in CPython."""
    api = ctypes.pythonapi
    for function in (api.PyInterpreterState_Main, api.PyInterpreterState_ThreadHead, api.PyThreadState_Next):
        function.restype = ctypes.c_void_p
    here = (ctypes.c_uint64 * 40).from_address(_state())
    if threading.get_ident() not in list(here):
        return {}
    at = list(here).index(threading.get_ident())
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found, state = {}, api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Main()))
    while state:
        found[str(state)] = names.get((ctypes.c_uint64 * 40).from_address(state)[at], "?")
        state = api.PyThreadState_Next(ctypes.c_void_p(state))
    return found


def _state() -> int:
    get = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    return int(get())


def _write(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(value))
    unfinished.replace(path)


if __name__ == "__main__":
    main()

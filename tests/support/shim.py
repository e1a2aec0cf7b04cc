"""An `embedctl` on PATH, for what runs in a shell: it is run as a fork."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.forked import Forked

#: Hands its streams, arguments, folder and variables to the test, and ends as the command does. A Python without its
#: site starts in a hundredth of a second.
_SCRIPT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as test:
    test.connect({path!r})
    call = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(test, [len(call).to_bytes(4, "big")], [0, 1, 2])
    test.sendall(call)
    sys.exit(int.from_bytes(test.recv(1), "big"))
"""


@contextmanager
def embedctl_on_path(folder: Path) -> Iterator[str]:
    """A folder for PATH, whose only command is `embedctl`. The block must end after its commands.

    Args:
        folder: where it is made; short enough for a unix socket.
    """
    place = folder / "bin"
    place.mkdir()
    script = place / "embedctl"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "sock"))
        listener.listen()
        script.write_text(_SCRIPT.format(python=sys.executable, path=str(place / "sock")))
        script.chmod(0o755)
        thread = threading.Thread(target=_serve, args=(listener,))
        thread.start()
        yield str(place)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:  # the block has ended
            return
        threading.Thread(target=_answer, args=(caller,)).start()


def _answer(caller: socket.socket) -> None:
    with caller:
        size, streams, _, _ = socket.recv_fds(caller, 4, 3)
        with caller.makefile("rb") as stream:
            arguments, folder, environment = json.loads(stream.read(int.from_bytes(size, "big")))
        process = Forked(arguments, environment, Path(folder), streams[1], streams[2], stdin=streams[0])
        for number in streams:
            os.close(number)
        caller.sendall((process.wait() % 256).to_bytes(1, "big"))

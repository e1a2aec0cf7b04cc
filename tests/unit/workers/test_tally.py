"""What a worker's chunks look like from outside after it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys

from embedctl_workers.machine.tally import Tally, make_file, read
from embedctl_workers.serving.in_hand import Held, InHand

WORKER = """
import os, signal, sys
from embedctl_workers.machine.tally import Tally
from embedctl_workers.serving.in_hand import Held, InHand

in_hand = InHand(tally=Tally(int(sys.argv[1])))
held = [Held("job", chunk, "token", "dummy") for chunk in range(3)]
for each in held:
    in_hand.take(each)
in_hand.completed()
in_hand.drop(held[0])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_numbers_survive_the_death_of_the_process_that_wrote_them() -> None:
    with make_file() as file:
        assert read(file) == (0, 0)
        command = [sys.executable, "-c", WORKER, str(file.fileno())]
        assert subprocess.run(command, pass_fds=[file.fileno()], check=False).returncode == -signal.SIGKILL
        assert read(file) == (2, 1)


def test_they_follow_what_is_taken_and_dropped() -> None:
    with make_file() as file:
        in_hand = InHand(tally=Tally(file.fileno()))
        held = Held("job", 0, "token", "dummy")
        in_hand.take(held)
        assert read(file) == (1, 0)
        in_hand.drop(held)  # given back
        assert read(file) == (0, 0)

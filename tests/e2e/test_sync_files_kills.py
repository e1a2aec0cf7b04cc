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

from tests.support.changes import SMALL_BLOCKS, Kill, Write, assert_holds, counts, killer, many, told
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.prepared import Step
from tests.support.processes import RunEmbedctl

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


@pytest.fixture
def kill(environment: dict[str, str], short_folder: Path) -> Kill:
    return killer(environment, short_folder, SMALL_BLOCKS)


class Nights:
    """The first night's output, and what the second one must make of it."""

    def __init__(self, folder: Path, write: Write, embedctl: RunEmbedctl, output: str, size: int = 250) -> None:
        self.folder, self.output, self._embedctl = folder, output, embedctl
        #: Larger than a block.
        self.documents = many(size)
        told(embedctl("submit", write(self.documents), "--sync", "-o", output, "--json"))
        del self.documents["id-1"], self.documents[f"id-{size * 4 // 5}"]
        self.documents |= {f"id-{at}": f"changed {at}" for at in range(size // 25, size - size // 25, size * 2 // 25)}
        write(self.documents)
        self._first = folder / "first"
        self._first.mkdir()
        for file in folder.glob(f"{Path(self.output).stem}.*"):
            shutil.copy(file, self._first)
        told(self.again())
        self._expected = self._files()
        assert Path(self.output).name in self._expected

    @property
    def command(self) -> tuple[str, ...]:
        return "submit", "corpus.jsonl", "--sync", "-o", self.output, *OPTIONS

    def again(self) -> subprocess.CompletedProcess[str]:
        return self._embedctl(*self.command, prepare=SMALL_BLOCKS)

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
def test_an_output_survives_a_kill_at_any_step(here: Here, output: str, steps: Sequence[Step], kill: Kill) -> None:
    here.start_worker()
    nights = Nights(here.folder, here.write, here.embedctl, output)
    if output == "v.parquet":
        assert_holds(here.folder / output, nights.documents)
    for step, when in itertools.product(steps, ("before", "after")):
        nights.begin()
        kill(step, when, *nights.command)
        done = nights.again()
        assert done.returncode == 0, (step, when, done.stderr)
        nights.assert_done()
        left = list(here.broker.jobs.newest())
        assert not left or step[1] in LEAVE_A_JOB, (step, when)
        for job in left:
            here.embedctl("discard", job.id)


@pytest.mark.slow
def test_two_at_once_make_one_output(here: Here) -> None:
    here.start_worker()
    nights = Nights(here.folder, here.write, here.embedctl, "v.parquet", 2500)  # so that they take long enough to meet
    for _ in range(3):
        nights.begin()
        both = [Forked(nights.command, here.environment, here.folder, prepare=SMALL_BLOCKS) for _ in range(2)]
        said = [process.communicate(timeout=120)[1] for process in both]
        assert 0 in [process.returncode for process in both], said
        assert "Traceback" not in "".join(said), said
        nights.assert_done()
        assert counts(json.loads(nights.again().stdout))[2] == 0
        nights.assert_done()

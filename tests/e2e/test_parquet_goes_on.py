"""A fetch into parquet that died goes on where it stopped, and the file is the one that it would have been."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow.parquet as pq
import pytest

from embedctl import Job, OutputError, enqueue_embeddings
from embedctl.broker import Broker
from embedctl.output import Numbers, OutputType, fetch, growing, parquet, parts, row_groups
from embedctl_config.settings import Settings
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.failpoints import Killed, dies_at, full_disk, kill_at
from tests.support.jobs import reference
from tests.support.rig import Rig, encoded_job

#: A kept field becomes wider in the middle of the file.
ITEMS = [{"id": f"r{i}", "text": f"text {i}" if i != 7 else "", "n": i if i < 50 else i + 0.5} for i in range(100)]
CHUNKS = 13


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group of three chunks, each of which is noted at once."""
    monkeypatch.setattr(growing, "ROWS", 20)
    monkeypatch.setattr(sys.modules["embedctl.output.fetch"], "_NOTE_EVERY_S", 0.0)


@pytest.fixture
def job(worker_broker: Broker, settings: Settings) -> Job:
    return encoded_job(worker_broker, settings, ITEMS, keep=("n",), count_tokens=True)


def read_from(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that each read of the results begins with, from now on."""
    begun: list[int] = []
    real = Job.iter_results

    def noted(self: Job, *, start: int = 0, **options: Any) -> Any:
        begun.append(start)
        return real(self, start=start, **options)

    monkeypatch.setattr(Job, "iter_results", noted)
    return begun


STEPS = [
    (growing.GrowingFile, "_write", 2),
    (growing.GrowingFile, "_write", 6),
    (growing.GrowingFile, "sync", 6),
    (parts.Progress, "save", 5),
    (parts.Progress, "save", 12),
    (growing.GrowingFile, "close", 1),
    (parquet, "publish", 1),
    (parts.Progress, "clear", 2),  # before the file begins again with a wider column
    (parts.Progress, "clear", 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("tidied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fetch_that_dies_between_two_steps_goes_on(job: Job, tmp_path: Path, tidied: bool) -> None:
    fetch(job, tmp_path / "whole.parquet")
    for (owner, name, count), after in product(STEPS, (False, True)):
        path = tmp_path / "v.parquet"
        with pytest.MonkeyPatch.context() as patched:
            kill_at(patched, owner, name, count, after=after)
            if not tidied:
                patched.setattr(parquet.ParquetWriter, "close", lambda self: None)
            with pytest.raises(Killed):
                fetch(job, path)
        assert path.exists() is ((name == "publish" and after) or (name, count) == ("clear", 3))
        fetch(job, path)
        assert path.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
        assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
        path.unlink()


def test_only_what_is_missing_is_read_again(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Killed):
        fetch(job, tmp_path / "v.parquet", written=dies_at(72))
    begun = read_from(monkeypatch)
    fetch(job, tmp_path / "v.parquet")
    # After the wider column, row groups end with the chunks 2, 5 and 8.
    assert begun == [9]
    file = pq.ParquetFile(tmp_path / "v.parquet")
    rows = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
    assert rows == [24, 24, 24, 24, 4]
    assert file.metadata.row_group(3).column(0).statistics.min == 72
    assert file.metadata.row_group(3).column(0).has_offset_index
    assert set(file.metadata.metadata) == {b"ARROW:schema"}
    frame = polars.read_parquet(tmp_path / "v.parquet")
    assert frame["n"].to_list() == [item["n"] for item in ITEMS]
    expected = reference([str(item["text"]) or "x" for item in ITEMS])
    np.testing.assert_array_equal(frame["embedding"].drop_nulls().to_numpy(), np.delete(expected, 7, 0))


@pytest.mark.parametrize("how", ["cut", "other bytes", "other footer", "a link", "gone", "other columns"])
def test_a_part_that_was_changed_is_written_again(job: Job, tmp_path: Path, how: str) -> None:
    fetch(job, tmp_path / "whole.parquet")

    with pytest.MonkeyPatch.context() as patched:
        if how == "other columns":
            patched.setattr(row_groups, "TOKENS", "tokens_of_old")
        with pytest.raises(Killed):
            fetch(job, tmp_path / "v.parquet", written=dies_at(72))
    part = tmp_path / ".v.parquet.part"
    good = part.read_bytes()
    ends = [at + 4 for at in range(4, len(good)) if good[at : at + 4] == b"PAR1"]
    if how == "cut":
        part.write_bytes(good[: len(good) // 3])
    elif how == "other bytes":
        part.write_bytes(bytes(len(good)))
    elif how == "other footer":  # an earlier one than the last
        at = next(end for end in ends if end > 1000)
        part.write_bytes(good[: at - 100] + bytes(90) + good[at - 10 :])
    elif how == "a link":
        part.rename(tmp_path / "elsewhere")
        part.symlink_to(tmp_path / "elsewhere")
    elif how == "gone":
        part.unlink()
    fetch(job, tmp_path / "v.parquet")
    assert (tmp_path / "v.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    if how == "a link":
        assert (tmp_path / "elsewhere").read_bytes() == good


def test_another_job_or_other_numbers_begin_again(
    job: Job, worker_broker: Broker, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = encoded_job(worker_broker, settings, [f"other {i}" for i in range(100)])

    for second, numbers in ((other, Numbers()), (job, Numbers(OutputType.FLOAT16))):
        with pytest.raises(Killed):
            fetch(job, tmp_path / "v.parquet", written=dies_at(72))
        with pytest.raises(OutputError, match="vectors of job"):
            fetch(other, tmp_path / "v.parquet", clobber=False)
        begun = read_from(monkeypatch)
        fetch(second, tmp_path / "v.parquet", numbers=numbers)
        assert begun[0] == 0
        (tmp_path / "v.parquet").rename(tmp_path / f"{numbers.kind}.parquet")
    frame = polars.read_parquet(tmp_path / "float32.parquet")
    np.testing.assert_array_equal(frame["embedding"].to_numpy(), reference([f"other {i}" for i in range(100)]))
    assert str(pq.read_schema(tmp_path / "float16.parquet").field("embedding").type.value_type) == "halffloat"


@pytest.mark.parametrize("name", ["v.jsonl", "v.npy", "v.parquet"])
def test_holes_of_a_stopped_job_are_filled_by_the_fetch_that_goes_on(
    name: str, worker_broker: Broker, settings: Settings, tmp_path: Path
) -> None:
    """Between two fetches, of which the first one died, the job went on that had been stopped."""
    texts = [f"text {i}" for i in range(100)]
    job = enqueue_embeddings(texts, settings=settings, chunk_size=8, idempotency_key="k")
    rig = Rig(worker_broker, settings, DummyBackend(dim=16))
    for chunk in (0, 1, 2, 3, 6, 7, 8, 9, 10):
        rig.run(job, chunk)
    job.stop()

    with pytest.raises(Killed):
        fetch(job, tmp_path / name, written=dies_at(80))
    enqueue_embeddings(texts, settings=settings, chunk_size=8, idempotency_key="k")
    for chunk in (4, 5, 11, 12):
        rig.run(job, chunk)
    fetch(job, tmp_path / name)
    if name == "v.npy":
        found = np.load(tmp_path / name)
    else:
        read = polars.read_ndjson if name == "v.jsonl" else polars.read_parquet
        found = np.array(read(tmp_path / name)["embedding"].to_list(), np.float32)
    np.testing.assert_array_equal(found, reference(texts))


def test_a_full_disk_leaves_nothing(job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with full_disk(6000), pytest.raises(OutputError, match=r"can't be written: .*File too large"):
        fetch(job, tmp_path / "v.parquet")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == "", "no footer is written once more as the writer is freed"
    fetch(job, tmp_path / "v.parquet")


SCRIPT = """
import sys
from embedctl import Job
from embedctl.output import fetch, growing
growing.ROWS = 40
sys.modules["embedctl.output.fetch"]._NOTE_EVERY_S = 0.0
path = __import__("pathlib").Path(sys.argv[2])
fetch(Job.get(sys.argv[1]), path, written=lambda chunk: print("written", flush=True))
"""


@pytest.mark.slow
def test_killed_at_random_moments(
    worker_broker: Broker, settings: Settings, environment: dict[str, str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(growing, "ROWS", 40)
    texts = [f"text {i}" for i in range(3000)]
    job = encoded_job(worker_broker, settings, texts)
    fetch(job, tmp_path / "whole.parquet")
    rng, kills = random.Random(1), 0
    begun = read_from(monkeypatch)
    for _attempt in range(40):
        (tmp_path / "v.parquet").unlink(missing_ok=True)
        command = [sys.executable, "-c", SCRIPT, job.id, str(tmp_path / "v.parquet")]
        reader = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert reader.stdout is not None
        # The moment is counted in chunks: a fast machine writes them all within a fixed time.
        for _chunk in range(rng.randint(1, 80)):
            reader.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.02))  # a random moment of the chunk
        os.kill(reader.pid, signal.SIGKILL)
        reader.stdout.close()
        kills += reader.wait() == -signal.SIGKILL and not (tmp_path / "v.parquet").exists()
        if kills == 4:
            break
    assert kills == 4
    (tmp_path / "v.parquet").unlink(missing_ok=True)
    fetch(job, tmp_path / "v.parquet")
    assert begun[-1] > 0
    assert (tmp_path / "v.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()

"""Big corpora need no more memory than small ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.workers import StartWorker

MEBIBYTE_KB = 1024
#: The command line, which tells its own peak as it ends. (rusage would tell ours: a child inherits it across exec.)
MEASURED = """
import atexit, re
from pathlib import Path
from embedctl.cli import main
status = Path("/proc/self/status")
atexit.register(lambda: Path("peak").write_text(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]))
main(prog_name="embedctl")
"""


def record(i: int) -> dict[str, object]:
    return {"id": i, "text": f"this is the text of record number {i} of this corpus"}


def request(i: int) -> dict[str, object]:
    """A line of a batch file."""
    return {"custom_id": str(i), "body": {"input": f"this is the text of record number {i} of this corpus"}}


def peak_rss_kb(arguments: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """Run a command; its peak resident set in KiB, and what it printed."""
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int((folder / "peak").read_text()), done.stdout


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("line", [record, request])
def test_submitting_and_fetching_take_no_more_memory_for_five_times_the_records(
    line: Callable[[int], dict[str, object]], environment: dict[str, str], start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker()
    submitted, fetched = {}, {}
    for records in (5_000, 25_000):
        with (short_folder / "corpus.jsonl").open("w") as stream:
            for i in range(records):
                stream.write(json.dumps(line(i)) + "\n")
        submitted[records], job_id = peak_rss_kb(["submit", "corpus.jsonl", "-q"], environment, short_folder)
        fetched[records], _ = peak_rss_kb(["fetch", job_id.strip(), "-o", "out.jsonl", "-q"], environment, short_folder)
    assert sum(1 for _ in (short_folder / "out.jsonl").open()) == records
    print({"submit": submitted, "fetch": fetched})
    for peaks in (submitted, fetched):
        assert peaks[25_000] - peaks[5_000] <= 2 * MEBIBYTE_KB, (submitted, fetched)

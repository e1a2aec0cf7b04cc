"""Corpora of several files, cut, nested or in arrays, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from embedctl.cli.run import _run_key
from embedctl.corpus import open_corpus
from tests.support.processes import RunEmbedctl


def test_a_dry_run_on_one_machine_needs_no_redis_and_writes_nothing(embedctl: RunEmbedctl, short_folder: Path) -> None:
    texts = ["A cat sits on the mat.", "A cat sits on the mat.", "", "word " * 600]
    (short_folder / "c.json").write_text(json.dumps(texts))
    before = sorted(short_folder.rglob("*"))

    def dry_run(*more: str) -> subprocess.CompletedProcess[str]:
        command = ["run", "c.json", "--dry-run", "--class", "cpu", *more]
        return embedctl(*command, EMBEDCTL_REDIS_URL="", PATH="")

    done = dry_run("--model", "all-MiniLM-L6-v2", "-o", "out.npy")
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert facts["class"] == "cpu"
    assert (facts["records"], facts["unusable"], facts["duplicates"]) == ("4", "1", "1")
    assert (facts["tokens"], facts["truncated"]) == (str(9 + 9 + 256), "1")
    assert facts["vectors"] == f"{4 * 384 * 4:,} bytes"
    assert facts["workers"] == "no Redis was asked"
    wrong = dry_run("--precision", "int8")
    assert wrong.returncode == 2
    assert "offers precision fp32, not int8" in wrong.stderr
    assert sorted(short_folder.rglob("*")) == before


def test_the_key_of_a_run_covers_all_files_and_the_limit(tmp_path: Path) -> None:
    def key(command: str = "command") -> str | None:
        return _run_key(open_corpus(str(tmp_path), max_bytes=10), command)

    (tmp_path / "a.txt").write_text("a")
    seen = {key(), key("with another limit")}
    assert None not in seen
    assert key() in seen
    (tmp_path / "b.txt").write_text("b")
    seen.add(key())
    (tmp_path / "b.txt").write_text("bc")
    seen.add(key())
    os.utime(tmp_path / "a.txt", (1, 1))
    seen.add(key())
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    seen.add(key())
    assert len(seen) == 6
    assert _run_key(open_corpus(str(tmp_path), "-", max_bytes=10), "command") is None

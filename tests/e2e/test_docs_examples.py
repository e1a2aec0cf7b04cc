"""The examples of the pages run as they stand, and do what the pages say.

Every ``python`` and ``console`` block is run, those of a page one after the other, but for one with a comment just
before it: ``<!-- not run: the reason -->``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.jobs import reference
from tests.support.workers import StartWorker

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
TEXTS = ["one", "two words", "three words here"]
TIMEOUT_S = 90


def examples(page: str, language: str) -> list[str]:
    """The blocks of a page that are to be run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    block = rf"^(<!-- not run: [^\n]+ -->\n)?```{language}\n(.*?)^```"
    return [source for not_run, source in re.findall(block, text, re.MULTILINE | re.DOTALL) if not not_run]


def commands(block: str) -> list[str]:
    """What a reader types: the lines behind a `$`; the others are what is printed."""
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page, "python")])
def test_python_examples_run(
    page: str,
    environment: dict[str, str],
    start_worker: StartWorker,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_worker()
    (short_folder / "corpus.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    monkeypatch.chdir(short_folder)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    names: dict[str, object] = {"__name__": "__main__"}
    for source in examples(page, "python"):
        exec(compile(source, page, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page, "console")])
def test_shell_examples_run(
    page: str, environment: dict[str, str], start_worker: StartWorker, short_folder: Path
) -> None:
    rows = [{"id": f"id-{at}", "text": text} for at, text in enumerate(TEXTS)]
    (short_folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start_worker()
    lines = ["set -eo pipefail"]
    for block in examples(page, "console"):
        assert commands(block), f"{page} has an example without a command: {block}"
        for command in commands(block):
            # `run` is shown to those who have no Redis yet.
            alone = command.startswith("embedctl run ")
            lines.append(f"(unset EMBEDCTL_REDIS_URL; {command})" if alone else command)
            if "-o vectors.npy" in command:
                lines.append("mv vectors.npy fetched-$((++files)).npy")
    script = short_folder / "examples.sh"
    script.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["bash", "-x", str(script)],
        env={
            **environment,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
            "EMBEDCTL_HARDWARE": "dummy",
            "EMBEDCTL_MODEL": "dummy",
        },
        cwd=short_folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = sorted(short_folder.glob("fetched-*.npy"))
    assert len(written) == sum("mv vectors.npy" in line for line in lines)
    for file in written:
        np.testing.assert_array_equal(np.load(file), reference(TEXTS))


def test_the_pages_have_examples_that_run() -> None:
    assert sum(len(examples(page, "python")) for page in PAGES) >= 5
    assert sum(len(commands(block)) for page in PAGES for block in examples(page, "console")) >= 5

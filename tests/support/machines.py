"""Simulated machines of all kinds: the answers of their tools, and the kernel's files about their CPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FAKE = Path(__file__).parent / "fakes" / "pynvml.py"


def _gpu(uuid: str, bus: str) -> dict[str, Any]:
    uuid = f"GPU-{uuid}-aaaa-bbbb-cccc-000000000000"
    return {"uuid": uuid, "name": "NVIDIA A100-SXM4-80GB", "memory": 81920, "bus": bus, "parts": []}


GPUS = [
    _gpu("11111111", "00000000:07:00.0"),
    _gpu("22222222", "00000000:0F:00.0"),
    _gpu("22333333", "00000001:47:00.0"),
]
UUIDS = [each["uuid"] for each in GPUS]


def play_gpus(folder: Path, gpus: Sequence[Mapping[str, Any]] = (), *, driver: str = "580.1", **fails: str) -> None:
    """Put NVIDIA's driver into a folder, which is to be on `PYTHONPATH`.

    Args:
        fails: what fails, `init` or `handle`, and what the driver says then.
    """
    folder.mkdir(exist_ok=True)
    (folder / FAKE.name).write_text(FAKE.read_text())
    (folder / "gpus.json").write_text(json.dumps({"gpus": gpus, "driver": driver, "fails": fails}))


def play(tool: Path, says: str) -> None:
    """Write a program that prints `says`."""
    tool.parent.mkdir(exist_ok=True)
    answer = tool.with_name(f"{tool.name}.answer")
    answer.write_text(says if says.endswith("\n") else says + "\n")
    tool.write_text(f'#!/bin/sh\nwhile IFS= read -r line; do echo "$line"; done < {answer}\n')
    tool.chmod(0o755)


def fake_topology(folder: Path, cores: dict[int, tuple[int, int]]) -> Path:
    for cpu, (package, core) in cores.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder

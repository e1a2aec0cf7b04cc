"""Simulated machines of all kinds: the answers of their tools, and the kernel's files about their CPUs."""

from __future__ import annotations

from pathlib import Path

SMI = """\
0, GPU-11111111-aaaa-bbbb-cccc-000000000000, NVIDIA A100-SXM4-80GB, 81920, 00000000:07:00.0
1, GPU-22222222-aaaa-bbbb-cccc-000000000000, NVIDIA A100-SXM4-80GB, 81920, 00000000:0F:00.0
2, GPU-22333333-aaaa-bbbb-cccc-000000000000, NVIDIA A100-SXM4-80GB, 81920, 00000001:47:00.0
"""
UUIDS = [line.split(", ")[1] for line in SMI.splitlines()]


def play(tool: Path, says: str, *, status: int = 0) -> None:
    """Write a program that prints `says` and exits with `status`."""
    tool.parent.mkdir(exist_ok=True)
    answer = tool.with_name(f"{tool.name}.answer")
    answer.write_text(says if says.endswith("\n") else says + "\n")
    tool.write_text(f'#!/bin/sh\nwhile IFS= read -r line; do echo "$line"; done < {answer}\nexit {status}\n')
    tool.chmod(0o755)


def fake_topology(folder: Path, cores: dict[int, tuple[int, int]]) -> Path:
    for cpu, (package, core) in cores.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder

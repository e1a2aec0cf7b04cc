"""Where the project verified the shipped hardware classes, for README's table and for `embedctl doctor`."""

from __future__ import annotations

from collections.abc import Mapping

from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass

_IN_CI = "verified in CI"
_NOT = "not verified on hardware"
_OWN = "your own class, not verified by the project"

#: Class → statement. A class that the project has run on its device names the device and the day, such as `verified on
#: an H200 on 2026-12-31`. A run with a stand-in for a device or a vendor's library verifies nothing.
VERIFIED: Mapping[str, str] = {
    "cpu": _IN_CI,
    "cpu-bf16": "verified on an AMD EPYC Zen 5 on 2026-11-24",
    "cpu-int8": _IN_CI,
    "gpu": "verified on an NVIDIA H200 on 2026-11-26",
    "gpu-tensorrt": _NOT,
    "neuron": _NOT,
}


def is_verified(name: str, entry: HardwareClass) -> bool:
    """Whether the project has run this class on its device, with the configuration that it has here."""
    return statement_of(name, entry) not in (_NOT, _OWN)


def statement_of(name: str, entry: HardwareClass) -> str:
    """The verification of a class, shipped or not, with the configuration that it has here."""
    shipped = SHIPPED_CLASSES.get(name)
    same = shipped is not None and (entry.device, entry.backend) == (shipped.device, shipped.backend)
    return VERIFIED[name] if same else _OWN

"""Where the shipped hardware classes were proven to work, in the words of README's table and of `embedctl doctor`."""

from __future__ import annotations

from collections.abc import Mapping

from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass

_IN_CI = "verified in CI"
_NOT = "not verified on hardware"
_OWN = "a class of your own, which nobody but you has verified"

#: Class → statement. One that was run on its device by the project says on which, and when: `verified on an H200 on
#: 2026-12-31`. A run with a stand-in for a device or a vendor's library verifies nothing.
VERIFIED: Mapping[str, str] = {
    "cpu": _IN_CI,
    "cpu-int8": _IN_CI,
    "gpu": _NOT,
    "gpu-tensorrt": _NOT,
    "neuron": _NOT,
}


def is_verified(name: str, entry: HardwareClass) -> bool:
    """Whether the project has run a class as it is configured here, on its device."""
    return statement_of(name, entry) not in (_NOT, _OWN)


def statement_of(name: str, entry: HardwareClass) -> str:
    """What is known of a class as it is configured here.

    Args:
        name: of a shipped class or of any other one.
    """
    shipped = SHIPPED_CLASSES.get(name)
    same = shipped is not None and (entry.device, entry.backend) == (shipped.device, shipped.backend)
    return VERIFIED[name] if same else _OWN

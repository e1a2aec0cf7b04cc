"""What of embedctl's declared packages is installed here, by the metadata of distributions: nothing is imported."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_NAME = "embedctl"


@dataclass(frozen=True, slots=True)
class Installed:
    """The packages of an extra, in words: those that are here with their versions, and what is lacking."""

    present: tuple[str, ...]
    lacking: tuple[str, ...]


def installed(extra: str = "") -> Installed:
    """What is here of all that an extra declares; without an extra, of what embedctl always needs.

    Raises PackageNotFoundError if embedctl itself has no metadata, as when it is run from its source.
    """
    present, lacking = list[str](), list[str]()
    for requirement in _declared(_NAME, extra):
        for each in (requirement, *_own_extras(requirement)):
            try:
                version = metadata.version(each.name)
            except metadata.PackageNotFoundError:
                lacking.append(f"no {each.name}")
                continue
            if each.specifier.contains(version, prereleases=True):
                present.append(f"{each.name} {version}")
            else:
                lacking.append(f"{each.name} {version}, not {each.specifier}")
    return Installed(tuple(dict.fromkeys(present)), tuple(dict.fromkeys(lacking)))


def _declared(name: str, extra: str) -> Iterator[Requirement]:
    """What a distribution requires on this machine for an extra, or in any case."""
    for requirement in _requirements(name):
        always, with_extra = (
            requirement.marker is None or requirement.marker.evaluate({"extra": wanted}) for wanted in ("", extra)
        )
        if with_extra and (not extra or not always):
            yield requirement


@functools.cache
def _requirements(name: str) -> Sequence[Requirement]:
    # Takes 20 ms to import, and the command line imports this module each time.
    from packaging.requirements import Requirement

    return [Requirement(line) for line in metadata.requires(name) or ()]


def _own_extras(requirement: Requirement) -> Iterator[Requirement]:
    """What the extras of a required package add, as `kombu[redis]` does; nothing if it is not installed."""
    try:
        for extra in sorted(requirement.extras):
            yield from _declared(requirement.name, extra)
    except metadata.PackageNotFoundError:
        return

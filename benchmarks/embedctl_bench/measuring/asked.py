"""The options of a benchmark's command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embedctl_bench.measuring import machine
from embedctl_bench.measuring.session import Session
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import format_cpus


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a command line.

    Attributes:
        command: the command line, which makes the report again.
        models: names from the settings, folders, or names of shapes (`embedctl_bench.measuring.shapes`).
        classes: hardware classes, all of them configured.
        cpus: all measurements run on these.
        output: the folder of reports.
        peers: names of peers to measure, installed if need be; `("all",)` for every peer, None for the installed
            peers, empty for none.
        price: of an hour of this machine; None for reports without costs.
        fresh: whether to discard the measurements of earlier runs.
    """

    settings: Settings
    command: str
    models: tuple[str, ...]
    classes: tuple[str, ...]
    cpus: frozenset[int]
    output: Path
    quick: bool
    peers: tuple[str, ...] | None
    price: float | None
    fresh: bool

    @property
    def cpu_list(self) -> str:
        """The CPUs as `--cpus` takes them, such as `0-3,8`."""
        return format_cpus(self.cpus)

    def session(self, name: str, plan: int, **conditions: object) -> Session:
        """A session in the folder of reports, for these CPUs and classes as they are configured.

        Measurements of `--quick` count for `--quick` only.
        """
        classes, models = dict(self.settings.classes), dict(self.settings.models)
        conditions |= {"cpus": self.cpu_list, "quick": self.quick, "classes": classes, "models": models}
        return Session(self.output, name, fresh=self.fresh, plan=plan, conditions=conditions)

    def machine(self) -> dict[str, object]:
        """Facts of this machine and its CPUs, for a report."""
        return machine.facts(self.cpus)

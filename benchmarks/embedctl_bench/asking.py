"""The options of all commands of `embedctl bench`, and their end: the report's files and the exit status."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from embedctl_bench.measuring import machine
from embedctl_bench.measuring.session import Session
from embedctl_bench.report.forms import write_report
from embedctl_bench.report.report import Report
from embedctl_config.cpu import no_bf16
from embedctl_config.errors import ExitStatus, MissingExtra, SettingsError
from embedctl_config.extras import installed
from embedctl_config.hardware import Device, HardwareClass
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from embedctl_workers.backends import BACKENDS
from embedctl_workers.commands.options import cpus_option
from embedctl_workers.machine.devices import format_cpus, usable_cpus
from embedctl_workers.machine.discovery import choose_accelerator

DEFAULT_MODEL = "all-MiniLM-L6-v2"
#: Extra → the module that proves that it is installed.
_PROOF = {"torch": "torch", "onnx": "onnxruntime"}

_Command = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a command line.

    Attributes:
        command: the command line, which makes the report again.
        models: names from the settings, folders, or names of shapes (`embedctl_bench.peers.models`).
        classes: hardware classes, all of them configured and of one kind of device.
        device: that kind. If it is not `cpu`, this process and its children see one such device only.
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
    device: Device
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


def common(command: _Command) -> _Command:
    """Give a benchmark the options of all benchmarks, passed to it as one :class:`Asked`."""

    @functools.wraps(command)
    def asking(**options: Any) -> Any:
        own = {name: options.pop(name) for name in list(options) if name not in _OPTIONS}
        _check_installed()
        return command(_asked(**options), **own)

    decorated: _Command = asking
    for option in reversed(_options()):
        decorated = option(decorated)
    return decorated


def conclude(report: Report, asked: Asked, session: Session) -> None:
    """Write the report with the session's notes and print the page's path. Exits with 130 after Ctrl-C."""
    whole = dataclasses.replace(
        report,
        machine={**(report.machine or asked.machine()), **session.meanwhile()},
        notes=[*_reservations(asked, session), *report.notes, *session.notes],
    )
    click.echo(str(write_report(whole, asked.output)))
    if session.stopped:
        sys.exit(ExitStatus.INTERRUPTED)


_OPTIONS = frozenset({"models", "classes", "cpus", "output", "quick", "peers", "price", "fresh"})


def _options() -> list[Callable[[Any], Any]]:
    """The click options, in the order of the help."""

    def option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
        variable = names[0].partition("/")[0].removeprefix("--").upper()
        return click.option(*names, envvar=f"EMBEDCTL_{variable}", show_envvar=True, **attributes)

    return [
        click.option(
            "--model",
            "models",
            multiple=True,
            default=(DEFAULT_MODEL,),
            show_default=True,
            help="A model, or a model shape with random weights, such as bge-small-shape. Can be repeated.",
        ),
        click.option(
            "--class",
            "classes",
            multiple=True,
            help="A hardware class. Can be repeated. Default: every CPU class that can run here.",
        ),
        cpus_option,
        option(
            "--output",
            "-o",
            type=click.Path(path_type=Path, file_okay=False),
            default=Path("report"),
            show_default=True,
            help="The folder for the report and the measurements.",
        ),
        option("--quick", is_flag=True, help="Measure only a small part, to check that the benchmark runs."),
        option(
            "--peers",
            metavar="LIST|all|none",
            help="Other systems to measure, separated by commas. The systems that you name are installed first, each "
            "in a separate environment. Default: the systems that are already installed.",
        ),
        option(
            "--price",
            type=click.FloatRange(min=0),
            help="This machine's price per hour, for the cost of a million texts.",
        ),
        option(
            "--fresh/--resume",
            default=False,
            show_default=True,
            help="Measure everything again, or resume where an earlier run in the same folder stopped.",
        ),
    ]


def _asked(
    *,
    models: tuple[str, ...],
    classes: tuple[str, ...],
    cpus: str | None,
    output: Path,
    price: float | None,
    quick: bool,
    fresh: bool,
    peers: str | None,
) -> Asked:
    settings = load_settings()
    found = _classes(settings, classes)
    return Asked(
        settings=settings,
        command=shlex.join(["embedctl", "bench", *sys.argv[1:]]),
        models=tuple(dict.fromkeys(models)),
        classes=found,
        device=_device(settings, found),
        cpus=usable_cpus(cpus),
        output=output,
        quick=quick,
        peers=_peers(peers),
        price=price,
        fresh=fresh,
    )


def _classes(settings: Settings, asked: tuple[str, ...]) -> tuple[str, ...]:
    """The classes asked for, or else every class of CPUs that can run here.

    Raises:
        SettingsError: there is no such class, or none that can run.
    """
    if asked:
        for name in asked:
            settings.hardware_class(name)
        return tuple(dict.fromkeys(asked))
    found = tuple(name for name, entry in settings.classes.items() if _can_run(entry))
    if not found:
        raise SettingsError("no class of CPUs can run here: pip install 'embedctl[bench]', or name a --class")
    return found


def _device(settings: Settings, classes: tuple[str, ...]) -> Device:
    """The kind of device of all classes; hides all but one, so that every system runs on the same.

    Raises:
        SettingsError: they are of several kinds, or this machine has no such device, or several and none was chosen.
    """
    devices = dict.fromkeys(settings.hardware_class(name).device for name in classes)
    if len(devices) > 1:
        raise SettingsError(f"--class: measure classes of {' and '.join(devices)} apart from each other")
    (device,) = devices
    if chosen := choose_accelerator(classes[0], device):
        chosen.hide_others()
    return device


def _can_run(entry: HardwareClass) -> bool:
    """Whether a class runs on CPUs, on this one too, and its runtime is installed."""
    proof = _PROOF.get(BACKENDS[entry.backend][1] if entry.backend in BACKENDS else "")
    if entry.device != "cpu" or proof is None or find_spec(proof) is None:
        return False
    return not (entry.backend == "torch-bf16" and no_bf16())


def _peers(text: str | None) -> tuple[str, ...] | None:
    names = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    if text is None:
        return None
    return () if names == ("none",) else names


def _check_installed() -> None:
    """Fail before anything is measured if something could not be measured.

    Raises:
        MissingExtra: a package of the extra `bench` is missing.
    """
    with suppress(PackageNotFoundError):  # it is run from its source: what lacks is told when it is needed
        if installed("bench").lacking:
            raise MissingExtra("bench", "`embedctl bench`")


def _reservations(asked: Asked, session: Session) -> list[str]:
    """Notes that a reader must see first."""
    found = []
    if session.stopped:
        found.append("**Stopped with Ctrl-C before everything was measured.**")
    if asked.quick:
        found.append("**A quick run** (`--quick`): it shows that the benchmark works. Do not quote its figures.")
    return found

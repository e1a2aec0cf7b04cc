"""The options of all commands of `embedctl bench`, and their end: the report's files and the exit status."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.session import Session
from embedctl_bench.report.files import write_report
from embedctl_bench.report.report import Report
from embedctl_config.cpu import no_bf16
from embedctl_config.errors import ExitStatus, MissingExtra, SettingsError
from embedctl_config.extras import installed
from embedctl_config.hardware import HardwareClass
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from embedctl_workers.backends import BACKENDS
from embedctl_workers.commands.options import cpus_option
from embedctl_workers.machine.devices import usable_cpus

DEFAULT_MODEL = "all-MiniLM-L6-v2"
#: Extra → the module that proves that it is installed.
_PROOF = {"torch": "torch", "onnx": "onnxruntime"}

_Command = Callable[..., Any]


def common(*, peers: bool = False, price: float | None = None) -> Callable[[_Command], _Command]:
    """The options of all benchmarks, passed to the command as one :class:`Asked`.

    Args:
        peers: whether it can measure other systems.
        price: the default price of an hour.
    """

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def asking(**options: Any) -> Any:
            own = {name: options.pop(name) for name in list(options) if name not in _OPTIONS}
            _check_installed()
            return command(_asked(**options), **own)

        decorated: _Command = asking
        for option in reversed(_options(peers=peers, price=price)):
            decorated = option(decorated)
        return decorated

    return decorate


def conclude(report: Report, asked: Asked, session: Session) -> None:
    """Write the report with the session's notes and print the page's path. Exits with 130 after Ctrl-C."""
    whole = dataclasses.replace(
        report,
        machine={**(report.machine or asked.machine()), **session.meanwhile()},
        notes=[*_reservations(asked, session), *report.notes, *session.notes],
    )
    page, *others = write_report(whole, asked.output)
    click.echo(f"also written: {', '.join(path.name for path in others)}", err=True)
    click.echo(str(page))
    if session.stopped:
        sys.exit(ExitStatus.INTERRUPTED)


_OPTIONS = frozenset({"models", "classes", "cpus", "output", "quick", "peers", "price", "fresh"})


def _options(*, peers: bool, price: float | None) -> list[Callable[[Any], Any]]:
    """The click options, in the order of the help."""

    def option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
        variable = names[0].partition("/")[0].removeprefix("--").upper()
        return click.option(*names, envvar=f"EMBEDCTL_{variable}", show_envvar=True, **attributes)

    found = [
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
            "--price",
            type=click.FloatRange(min=0),
            default=price,
            show_default=price is not None,
            help="This machine's price per hour, for the cost of a million texts.",
        ),
        option(
            "--fresh/--resume",
            default=False,
            show_default=True,
            help="Measure everything again, or continue where an earlier run in the same folder stopped.",
        ),
    ]
    if peers:
        found.insert(
            5,
            option(
                "--peers",
                metavar="LIST|all|none",
                help="Other systems to measure, separated by commas. The systems that you name are installed "
                "first, each in a separate environment. Default: the systems that are already installed.",
            ),
        )
    return found


def _asked(
    *,
    models: tuple[str, ...],
    classes: tuple[str, ...],
    cpus: str | None,
    output: Path,
    price: float | None,
    quick: bool,
    fresh: bool,
    peers: str | None = None,
) -> Asked:
    settings = load_settings()
    return Asked(
        settings=settings,
        command=shlex.join(["embedctl", "bench", *sys.argv[1:]]),
        models=tuple(dict.fromkeys(models)),
        classes=_classes(settings, classes),
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
    """Fail before anything is measured if something could not be measured, or the report not be drawn.

    Raises:
        MissingExtra: a package of the extra `bench` is missing.
    """
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

"""The options of all commands of `embedctl bench`, and their end: the report's files and the exit status."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from embedctl_bench.measuring import machine
from embedctl_bench.measuring.comparison import Scene, each_scene
from embedctl_bench.measuring.contenders import Ground
from embedctl_bench.measuring.session import Session
from embedctl_bench.peers.environments import requirements_digest
from embedctl_bench.peers.models import Model, peers_folder, slug
from embedctl_bench.peers.tuned import Task, Workload, reference_of
from embedctl_bench.report import Report, write_report
from embedctl_config.command_group import option
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
from embedctl_workers.models.cache import private_folder

#: Extra → the module that proves that it is installed.
_PROOF = {"torch": "torch", "onnx": "onnxruntime"}
#: What every report says of its figures.
_METHOD = (
    "Systems take turns, and figures are medians of the rounds; one is marked noisy if its rounds differ by more than "
    "10 %. Each ratio is the median over the rounds in which both systems ran. Percentiles are of all requests of all "
    "rounds together; a 99th needs 100.",
    "Each system chose the fastest of its settings on a sample, if several are shown as tried, and encoded all texts "
    "with references once before the rounds.",
    "A system is not ranked if it encodes fewer tokens than ours, if it promises fp32 and a component of a vector "
    "differs by more than 1e-4 from sentence-transformers on torch in fp32, one text at a time, or if it promises 16 "
    "bits and a cosine to these vectors is below 0.999. A system at its default promises what it computes in.",
)
#: In the order of `--help`.
_OPTIONS: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...] = (
    click.option(
        "--model",
        "models",
        multiple=True,
        default=("all-MiniLM-L6-v2",),
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
        help="Other systems to measure, separated by commas. The systems that you name are installed first, each in a "
        "separate environment. Default: the systems that are already installed.",
    ),
    option(
        "--fresh/--resume",
        default=False,
        show_default=True,
        help="Measure everything again, or resume where an earlier run in the same folder stopped.",
    ),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a command line.

    Attributes:
        models: names from the settings, folders, or names of shapes (`embedctl_bench.peers.models`).
        classes: hardware classes, all of them configured and of one kind of device.
        device: that kind. If it is not `cpu`, this process and its children see one such device only.
        cpus: all measurements run on these.
        peers: names, installed if need be; `("all",)` for every peer, None for the installed ones, empty for none.
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
    fresh: bool

    @property
    def place(self) -> Path:
        """The folder of the peers' environments, and of everything that is made for them."""
        return private_folder(peers_folder(self.settings))

    def session(self, name: str, plan: int) -> Session:
        """A session in the folder of reports, for these CPUs, classes as they are configured, and `--quick` or not."""
        conditions = {
            "cpus": format_cpus(self.cpus),
            "quick": self.quick,
            "classes": dict(self.settings.classes),
            "models": dict(self.settings.models),
            "peers": requirements_digest(),
        }
        return Session(self.output, name, fresh=self.fresh, plan=plan, conditions=conditions)

    def ground(self, key: str, model: Model, workload: Workload, session: Session, **more: Any) -> Ground:
        """What all systems have in common on one model, with more attributes; computes the reference unless it is kept,
        else raises Unavailable."""
        task = Task(model, workload, sorted(self.cpus), self.place)
        session.say(f"{key}: {len(workload.lengths)} references by torch in fp32, unless they are kept")
        reference = reference_of(task, "cuda" if self.device == "gpu" else "cpu")
        return Ground(key, task, reference, session, self.quick, **more)


def common(command: Callable[..., None]) -> Callable[..., None]:
    """Give a benchmark the options of all benchmarks, passed to it as one :class:`Asked`."""

    @functools.wraps(command)
    def asking(models: Sequence[str], classes: Sequence[str], cpus: str | None, peers: str | None, **more: Any) -> None:
        with suppress(PackageNotFoundError):  # it is run from its source: what lacks is told when it is needed
            if installed("bench").lacking:
                raise MissingExtra("bench", "`embedctl bench`")
        settings = load_settings()
        found = _classes(settings, classes)
        as_given = {name: more.pop(name) for name in ("output", "quick", "fresh")}
        asked = Asked(
            settings=settings,
            command=shlex.join(["embedctl", "bench", *sys.argv[1:]]),
            models=tuple(dict.fromkeys(models)),
            classes=found,
            device=_device(settings, found),
            cpus=usable_cpus(cpus),
            peers=None if peers is None else _peers(peers),
            **as_given,
        )
        command(asked, **more)

    for each in reversed(_OPTIONS):
        asking = each(asking)
    return asking


def conclude(
    asked: Asked,
    session: Session,
    scenes: Sequence[Scene],
    report: Report,
    published: Callable[[Scene], Sequence[Mapping[str, object]]] = lambda scene: (),
) -> None:
    """Write the report of all scenes, as far as they were measured, and print the page's path.

    Exits with 130 after Ctrl-C.

    Args:
        report: what stands beside the tables, models and notes of the scenes, which are put in.
        published: rows to put under a scene's own.
    """
    found: list[str] = []
    if session.stopped:
        found.append("**Stopped with Ctrl-C before everything was measured.**")
    if asked.quick:
        found.append("**A quick run** (`--quick`): it shows that the benchmark works. Do not quote its figures.")
    whole = replace(
        report,
        name=session.name,
        command=asked.command,
        workload=" ".join([report.workload, *(f"{each.name}: {each.shown}." for each in scenes)]),
        machine={**machine.facts(asked.cpus), **session.meanwhile()},
        tables=[
            *each_scene(scenes, lambda scene: scene.tables(slug(scene.name), published(scene))),
            *report.tables,
        ],
        notes=[*found, *each_scene(scenes, Scene.notes), *report.notes, *_METHOD],
    )
    click.echo(str(write_report(whole, asked.output)))
    if session.stopped:
        sys.exit(ExitStatus.INTERRUPTED)


def not_installed(peers: Sequence[str]) -> list[str]:
    """A note on the peers that are not installed, if there are any."""
    return [f"Not installed, and so not measured: {', '.join(peers)} (`--peers` installs them)."] if peers else []


def _classes(settings: Settings, asked: Sequence[str]) -> tuple[str, ...]:
    """The classes asked for, or else every class of CPUs that can run here; SettingsError if there is none."""
    if asked:
        for name in asked:
            settings.hardware_class(name)
        return tuple(dict.fromkeys(asked))
    found = tuple(name for name, entry in settings.classes.items() if _can_run(entry))
    if not found:
        raise SettingsError("no class of CPUs can run here: pip install 'embedctl[bench]', or name a --class")
    return found


def _device(settings: Settings, classes: tuple[str, ...]) -> Device:
    """The kind of device of all classes; hides all but one, so that every system runs on the same. A SettingsError says
    that they are of several kinds, or that this machine has no such device, or several and none was chosen."""
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


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    return () if names == ("none",) else names

"""Plans the workers that `embedctl up` starts, as a function of the machine, the settings and the options."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from embedctl.queueing.routing import FALLBACK_CLASS
from embedctl_config.address import LAST_PORT, Address, address_of
from embedctl_config.cpu import no_bf16
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import Device
from embedctl_config.settings import ENV_PREFIX, Settings
from embedctl_workers.machine.devices import Accelerator, Pinned
from embedctl_workers.machine.discovery import DEVICE_NAMES, DEVICE_OPTIONS, CpuSet, Machine, nothing_found
from embedctl_workers.tables import table

#: The best number of workers for a hardware class, its models, a set of CPUs, and the accelerator that they share.
Advice = Callable[[str, Sequence[str], frozenset[int], Accelerator | None], int]


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker to start: where, and how many (`sharing`) share its accelerator. If `metrics_address` is empty, it
    serves none.
    """

    hardware: str
    cpus: CpuSet
    models: tuple[str, ...]
    accelerator: Accelerator | None = None
    metrics_address: str = ""
    sharing: int = 1
    #: Further options of `embedctl worker` that every worker of the plan has.
    asked: tuple[str, ...] = ()

    @property
    def pinned(self) -> Pinned:
        return Pinned(self.cpus.cpus, self.cpus.threads, self.accelerator, self.sharing)

    @property
    def name(self) -> str:
        """Its name without the host, such as `cpu:0-3`; a number is added if a live worker has this name."""
        return f"{self.hardware}:{self.pinned.label}"

    @property
    def arguments(self) -> list[str]:
        """The options of `embedctl worker`."""
        arguments = ["--class", self.hardware]
        if self.accelerator is not None:
            arguments += [DEVICE_OPTIONS[self.accelerator.kind], self.accelerator.uid]
        if self.sharing > 1:
            arguments += ["--gpu-workers", str(self.sharing)]
        arguments += ["--cpus", self.pinned.cpu_list]
        if self.cpus.threads != len(self.cpus.cores):
            arguments += ["--threads", str(self.cpus.threads)]
        return [*arguments, *(word for model in self.models for word in ("--model", model)), *self.asked]

    @property
    def environment(self) -> Mapping[str, str]:
        return {f"{ENV_PREFIX}METRICS_ADDRESS": self.metrics_address} if self.metrics_address else {}

    @property
    def command(self) -> str:
        return _by_hand(self.environment, "worker", *self.arguments)


@dataclass(frozen=True, slots=True)
class PlannedGateway:
    """A gateway beside the workers: where it listens, the model of calls that name none, its class, or `auto`."""

    address: str
    model: str
    hardware: str

    @property
    def environment(self) -> Mapping[str, str]:
        return {f"{ENV_PREFIX}HARDWARE": self.hardware, f"{ENV_PREFIX}MODEL": self.model}

    @property
    def command(self) -> str:
        return _by_hand(self.environment, "gateway")


@dataclass(frozen=True, slots=True)
class Plan:
    """The workers to start, notes for the operator about the choice, and the gateway if one is to run."""

    workers: Sequence[PlannedWorker]
    notes: Sequence[str] = ()
    gateway: PlannedGateway | None = None

    def __str__(self) -> str:
        rows = [("class", "device", "cpus", "threads", "models", "command")]
        for worker in self.workers:
            pinned = worker.pinned
            models = ",".join(worker.models)
            rows.append((worker.hardware, pinned.device, pinned.cpu_list, str(pinned.threads), models, worker.command))
        if self.gateway is not None:
            rows.append(("gateway", self.gateway.address, "-", "-", self.gateway.model, self.gateway.command))
        return "\n".join(table(rows))


def make_plan(
    settings: Settings,
    machine: Machine,
    *,
    classes: Sequence[str] = (),
    models: Sequence[str] = (),
    advice: Advice = lambda hardware, models, cpus, accelerator: 1,
) -> Plan:
    """Decide which worker runs where.

    Classes of the same kind of device share the accelerators. A set of CPUs is shared evenly between the accelerators
    near it and the classes on CPUs. Each accelerator, and each set of CPUs for each class on CPUs, has the number of
    workers that the class sets, else the one that `advice` gives, else one. Advice for a set of CPUs is asked only if
    nothing else is on that set. The workers of an accelerator divide its CPUs evenly.

    No `classes` mean the setting `hardware`, no `models` those of the class, else those of the settings. A
    SettingsError if there is no such class; if its device is not here, or the CPU has nothing for it; if there are more
    classes than devices of a kind; or if the setting `auto` may mean several classes.
    """
    chosen, notes = _chosen_classes(settings, machine, classes)
    accelerators = [
        (name, accelerator)
        for kind in DEVICE_OPTIONS
        for name, share in _shared_out(settings, machine, kind, chosen)
        for accelerator in share
    ]
    on_cpus = [name for name in chosen if settings.classes[name].device == "cpu"]
    models_of = {name: tuple(models) or settings.classes[name].models or (settings.model,) for name in chosen}

    def workers_of(name: str, cpus: CpuSet, accelerator: Accelerator | None = None, *, ask: bool = True) -> int:
        advised = partial(advice, name, models_of[name], cpus.cpus, accelerator)
        return settings.classes[name].workers_per_device or (max(1, advised()) if ask else 1)

    planned: list[PlannedWorker] = []
    for cpus, near in zip(machine.cpu_sets, _placed(machine.cpu_sets, accelerators), strict=True):
        ask = len(on_cpus) == 1 and not near
        seats = [*near, *((name, None) for name in on_cpus for _ in range(workers_of(name, cpus, ask=ask)))]
        here: list[PlannedWorker] = []
        for (name, accelerator), share in zip(seats, cpus.shared_out(len(seats)), strict=True):
            sharing = 1 if accelerator is None else workers_of(name, share, accelerator)
            here += [
                PlannedWorker(name, part, models_of[name], accelerator, sharing=sharing)
                for part in share.shared_out(sharing)
            ]
        if len(here) > len(cpus.cores):
            notes.append(f"{len(here)} workers share {len(cpus.cores)} physical cores, and slow each other down")
        planned += here
    planned.sort(key=lambda worker: worker.accelerator is None)
    return Plan(_with_metrics(planned, settings.metrics_address), notes)


def with_gateway(plan: Plan, settings: Settings) -> Plan:
    """The plan with a gateway. The settings' class and model are its own only if a worker of the plan serves them."""
    classes = {worker.hardware for worker in plan.workers}
    models = [model for worker in plan.workers for model in worker.models]
    gateway = PlannedGateway(
        address=str(address_of(settings.gateway_address, "gateway_address")),
        model=settings.model if settings.model in models else models[0],
        hardware=settings.hardware if settings.hardware in classes else "auto",
    )
    return replace(plan, gateway=gateway)


def _chosen_classes(settings: Settings, machine: Machine, asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """The classes to serve, and notes about the choice."""
    chosen = list(dict.fromkeys(name for name in asked or [settings.hardware] if name != "auto"))
    chosen, notes = (chosen, []) if chosen else _fitting_classes(settings, machine)
    for name in chosen:
        device, backend = settings.hardware_class(name).device, settings.hardware_class(name).backend
        if backend == "torch-bf16" and (why := no_bf16()):
            raise SettingsError(f"class {name}: {why}")
        if device != "cpu" and not machine.accelerators(device):
            raise nothing_found(name, device, machine.problems.get(device, ""))
    return chosen, notes


def _fitting_classes(settings: Settings, machine: Machine) -> tuple[list[str], list[str]]:
    """The classes that `auto` means, and notes: one for each kind of accelerator here; if there is none, `cpu`."""
    chosen: list[str] = []
    notes = list(machine.problems.values())
    for kind in DEVICE_OPTIONS:
        found = len(machine.accelerators(kind))
        if found and (name := _class_for(settings, kind)):
            chosen.append(name)
        elif found:
            what = f"{found} {DEVICE_NAMES[kind]}{'s' if found > 1 else ''}"
            notes.append(f'not used: {what}, because no hardware class has device = "{kind}"')
    return chosen or [FALLBACK_CLASS], notes


def _class_for(settings: Settings, kind: Device) -> str:
    """The class that `auto` means for a kind of accelerator; empty if there is none."""
    fitting = [name for name, entry in settings.classes.items() if entry.device == kind]
    if kind in fitting:
        return kind
    if len(fitting) > 1:
        raise SettingsError(
            f"hardware: auto is ambiguous for a {DEVICE_NAMES[kind]} here: choose one of {', '.join(sorted(fitting))} "
            "with --class"
        )
    return fitting[0] if fitting else ""


def _shared_out(
    settings: Settings, machine: Machine, kind: Device, chosen: Iterable[str]
) -> list[tuple[str, Sequence[Accelerator]]]:
    """The accelerators of a kind, shared out to the classes that run on it."""
    names = [name for name in chosen if settings.classes[name].device == kind]
    found = machine.accelerators(kind)
    if len(names) > len(found):
        raise SettingsError(
            f"--class: {' and '.join(names)} each need a {DEVICE_NAMES[kind]} of their own, and there "
            f"{'is' if len(found) == 1 else 'are'} {len(found)} here: leave out some"
        )
    return [(name, found[at :: len(names)]) for at, name in enumerate(names)]


def _placed(
    cpu_sets: Sequence[CpuSet], accelerators: Iterable[tuple[str, Accelerator]]
) -> list[list[tuple[str, Accelerator | None]]]:
    """The accelerators near each set of CPUs: those of its node; one without a node joins the set with the fewest."""
    placed: list[list[tuple[str, Accelerator | None]]] = [[] for _ in cpu_sets]
    near = {cpus.node: at for at, cpus in enumerate(cpu_sets) if cpus.node is not None}
    for name, accelerator in accelerators:
        fewest = min(range(len(placed)), key=lambda at: len(placed[at]))
        at = fewest if accelerator.node is None else near.get(accelerator.node, fewest)
        placed[at].append((name, accelerator))
    return placed


def _with_metrics(workers: Sequence[PlannedWorker], first: str) -> Sequence[PlannedWorker]:
    """The same workers, each with a separate port for its metrics if there is a first address."""
    if not first:
        return workers
    host, port = address_of(first, "metrics_address")
    if port and port + len(workers) - 1 > LAST_PORT:
        raise SettingsError(f"metrics_address: {len(workers)} workers from port {port} on go beyond {LAST_PORT}")
    return [replace(each, metrics_address=str(Address(host, port and port + at))) for at, each in enumerate(workers)]


def _by_hand(environment: Mapping[str, str], *words: str) -> str:
    """A command for a shell, which takes no quoted word for a variable."""
    variables = (f"{name}={shlex.quote(value)} " for name, value in environment.items())
    return "".join(variables) + shlex.join(["embedctl", *words])

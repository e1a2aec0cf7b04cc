"""The traces that a machine runs: their recipe, and how they are found or built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from embedctl_config.errors import MissingExtra, SettingsError
from embedctl_workers.backends.neuron.runtime import (
    COMPILER,
    RUNTIME,
    TARGETS,
    core_flags,
    machine_target,
    require_device,
    version_of,
)
from embedctl_workers.backends.onnx.recipe import OWN
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact, Wanted
from embedctl_workers.models.build_process import found_or_built, require
from embedctl_workers.models.builders import USUAL, BuildOptions
from embedctl_workers.models.files import ModelFiles

#: The shortest default bucket (tokens). Each further one is twice as long as the one before.
_SHORTEST_DEFAULT = 32
#: The shortest bucket allowed (tokens): the example needs room for padding, or tracing would leave out the mask.
_SHORTEST_ALLOWED = 2
_CASTS = ("matmult", "none")
#: The kind of artefact. The backend that runs it has the same name.
NEURON = "neuron"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a model is traced."""

    buckets: Sequence[int] = ()  #: lengths in tokens, ascending; empty: 32, 64, 128 and so on
    batch: int = 16  #: rows of every run of the device
    auto_cast: str = "matmult"  #: the operations that are computed in bf16: `matmult`, or `none`
    target: str = ""  #: the instance family; empty: this machine's

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> TraceOptions:
        """Check a class's options; a SettingsError if one of them is not valid."""
        chosen = cls()
        buckets = _buckets(options.get("buckets", ""))
        batch = options.get("batch", chosen.batch)
        auto_cast = options.get("auto_cast", chosen.auto_cast)
        target = options.get("target", chosen.target)
        if type(batch) is not int or batch < 1:
            raise SettingsError(f"option batch of backend neuron: {batch!r} is not a number of rows, such as 16")
        if auto_cast not in _CASTS:
            raise SettingsError(f"option auto_cast of backend neuron: {auto_cast!r} is neither {' nor '.join(_CASTS)}")
        if target not in ("", *TARGETS):
            raise SettingsError(f"option target of backend neuron: {target!r} is none of {', '.join(TARGETS)}")
        return cls(buckets, batch, auto_cast, target)

    @property
    def flags(self) -> list[str]:
        flags = ["--model-type", "transformer", "--auto-cast", self.auto_cast]
        # Without --auto-cast the type alone changes nothing.
        return flags if self.auto_cast == "none" else [*flags, "--auto-cast-type", "bf16"]

    @property
    def recipe(self) -> dict[str, str]:
        """All options that determine a trace, except the target."""
        buckets = " ".join(map(str, self.buckets)) or "doubling"
        return {"buckets": buckets, "batch": str(self.batch), "flags": " ".join(self.flags)}

    def buckets_for(self, max_tokens: int) -> list[int]:
        """A model's buckets, ascending, in tokens, up to its maximum; a SettingsError if those set are too short."""
        buckets = list(self.buckets) or [_SHORTEST_DEFAULT]
        while not self.buckets and buckets[-1] < max_tokens:
            buckets.append(2 * buckets[-1])
        if buckets[-1] < max_tokens:
            raise SettingsError(
                f"option buckets of backend neuron ends at {buckets[-1]} tokens, and the model takes {max_tokens}: add "
                f"{max_tokens}"
            )
        return [*(bucket for bucket in buckets if bucket < max_tokens), max_tokens]


def _buckets(value: object) -> list[int]:
    """Parse `32, 64, 128` into numbers, ascending."""
    try:
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError  # noqa: TRY004, TRY301  (one message for every fault)
        buckets = sorted({int(part) for part in str(value).split(",") if part.strip()})
        if buckets and buckets[0] < _SHORTEST_ALLOWED:
            raise ValueError  # noqa: TRY301  (as above)
    except ValueError:
        raise SettingsError(
            f"option buckets of backend neuron: {value!r} is not a list of lengths in tokens, such as '32,64,128'"
        ) from None
    return buckets


def wanted(files: ModelFiles, options: TraceOptions, target: str) -> Wanted:
    """The artefact for a target; MissingExtra if torch_neuronx is not installed. Raises as :func:`core_flags`."""
    runtime = version_of(RUNTIME)
    if not runtime:
        raise MissingExtra("neuron", "backend 'neuron'")
    recipe = {"kind": NEURON, **options.recipe, "target": target, RUNTIME: runtime, COMPILER: version_of(COMPILER)}
    recipe["flags"] = " ".join([*options.flags, *core_flags(target)])
    return Wanted(files.fingerprint, recipe)


def build(files: ModelFiles, host: Host, how: BuildOptions) -> Artifact:
    """See :class:`embedctl_workers.models.builders.Builder`; the target `neuron` is Inf2."""
    if how.exporter != OWN:
        raise SettingsError(f"backend {NEURON!r} traces the model itself: leave --exporter {how.exporter} out")
    target = TARGETS[0] if how.target == NEURON else how.target
    chosen = TraceOptions.parse(how.options)
    return artifact_for(files, host, chosen, replace(how, target=target))


def artifact_for(files: ModelFiles, host: Host, options: TraceOptions, how: BuildOptions = USUAL) -> Artifact:
    """An artefact, as :func:`found_or_built`; of `how`, the target counts too.

    The target is one of :data:`~.runtime.TARGETS`; an empty one stands for this machine's device. Raises WorkerError if
    it has none.
    """
    if not how.target:
        require_device()
    want = wanted(files, options, how.target or options.target or machine_target())
    more = {
        "options": {**asdict(options), "buckets": ",".join(map(str, options.buckets))},
        "flags": want.recipe["flags"].split(),
        "target": want.recipe["target"],
        "elsewhere": bool(how.target),
    }
    ready = partial(require, "neuron", "sentence_transformers")
    return found_or_built(files, want, host, how, ready, **more)

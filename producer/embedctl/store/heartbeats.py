"""What a worker says of itself every few seconds, and how it is read: a thousand heartbeats are a megabyte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from typing import Literal

from embedctl_config import keys
from embedctl_config.outputs import PLAIN

#: Digits of a fingerprint that people tell two of them apart by.
_FINGERPRINT_SHOWN = 8
#: A class, the models and their engines, in words, and the beginnings of the models' fingerprints.
Kind = tuple[str, str, str, str]
#: A worker that encodes but finishes no batch for this long is shown as hung (seconds).
HUNG_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as one worker serves it.

    Attributes:
        tokens_per_s, rows_per_s: rates while it encodes, as measured so far.
        padding: the share of padding in the tokens that the device received, as measured so far.
        engine: what runs it, in words.
        accuracy: the gate's measurement at start, in words; empty if there was no reference.
        spelling_of: if this name is another spelling of a model that the worker serves, that model's name; else empty.
        sustained_tokens_per_s: the rate with chunks that are large enough to tell it; 0 if there was none yet.
        max_tokens: longer texts are truncated.
        prompts: the names of the model's own prompts; None if they are too many to say.
        outputs: what the model gives of a text (:class:`~embedctl_config.outputs.Output`).
        multi_width: dimensions of each vector of a multi-vector; 0 if it gives none.
        matryoshka: whether its files say that it was trained for shorter vectors, or there are no files.
        pooling: how its files say that vectors are made of tokens' states, such as `mean`; empty if they do not.
    """

    fingerprint: str
    dim: int
    tokens_per_s: float
    engine: str = ""
    accuracy: str = ""
    rows_per_s: float = 0.0
    padding: float = 0.0
    spelling_of: str = ""
    sustained_tokens_per_s: float = 0.0
    max_tokens: int = 0
    prompts: Sequence[str] | None = None
    outputs: Sequence[str] = field(default_factory=lambda: list(PLAIN))
    multi_width: int = 0
    matryoshka: bool = True
    pooling: str = ""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker process, as its heartbeat describes it.

    Attributes:
        instance: unique to the process; `name` is the Celery node name, which the next process uses again.
        machine, process: ids that other processes of the same machine can check; see :mod:`embedctl.common.machine`.
        cpus: the CPUs that it is pinned to; `threads`: its number of compute threads.
        bounds: bounds of its class that replace the precision's at the accuracy gate, in words.
        holding: (job, chunk) of each chunk in hand.
        progressed_ms: when it last finished a batch, in ms by approximately Redis' clock; 0 before the first.
        quiet_s: seconds without progress of the current encode; 0 while it encodes nothing.
        device: the device that it is pinned to, such as `cpu 0-3`, `gpu GPU-…` or `neuron 0`.
        metrics: the URL of its metrics and its health; empty if it serves none.
        quarantine: whether it takes only what may kill a worker.
    """

    instance: str
    name: str
    pid: int
    host: str
    hardware: str
    backend: str
    precision: str
    cpus: str
    threads: int
    models: Mapping[str, ServedModel] = field(default_factory=dict)
    holding: tuple[tuple[str, int], ...] = ()
    progressed_ms: int = 0
    machine: str = ""
    process: str = ""
    quiet_s: float = 0.0
    bounds: str = ""
    device: str = ""
    metrics: str = ""
    quarantine: bool = False

    @property
    def activity(self) -> Literal["idle", "busy", "hung"]:
        """Whether it holds a chunk and makes progress. After `hang_s` without progress, it ends itself."""
        if self.quiet_s >= HUNG_AFTER_S:
            return "hung"
        return "busy" if self.holding else "idle"

    @property
    def queues(self) -> list[str]:
        """The queues that it consumes, one for each name of each model."""
        return [keys.queue(self.hardware, model) for model in self.models]

    @property
    def kind(self) -> Kind:
        """What it has in common with the workers that serve the same models in the same way."""
        loaded = self.loaded
        engines = dict.fromkeys(served.engine or self.backend for served in loaded.values())
        files = ", ".join(served.fingerprint[:_FINGERPRINT_SHOWN] for served in loaded.values())
        return self.hardware, ", ".join(loaded), ", ".join(engines), files

    @property
    def loaded(self) -> dict[str, ServedModel]:
        """The models that it holds, each under one name."""
        return {model: served for model, served in self.models.items() if not served.spelling_of}


def written(worker: WorkerRow) -> str:
    """A worker's heartbeat, as JSON."""
    return json.dumps(asdict(worker))


def parse(beat: bytes) -> WorkerRow:
    """The worker of a heartbeat; raises ValueError, TypeError, LookupError or AttributeError if it is none."""
    import orjson  # here, because most commands read no heartbeat

    try:
        facts = orjson.loads(beat)
    except ValueError:  # it holds a number or a character that orjson refuses, or is no heartbeat
        facts = json.loads(beat.decode())
    facts["models"] = {name: ServedModel(*_in_model(model)) for name, model in facts["models"].items()}
    facts["holding"] = tuple([(job, chunk) for job, chunk in facts["holding"]])
    return WorkerRow(*_in_row(facts))


# To pass the facts by position takes half the time.
_in_row, _in_model = (itemgetter(*(each.name for each in fields(of))) for of in (WorkerRow, ServedModel))

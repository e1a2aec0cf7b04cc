"""Which vectors a job will compute, before a worker has claimed any of it."""

from __future__ import annotations

from dataclasses import dataclass

from embedctl.broker import Broker
from embedctl.destinations.about import About, deciding
from embedctl.routing import same_model
from embedctl.store import JobSpec
from embedctl_config import keys
from embedctl_config.fingerprint import job_fingerprint


@dataclass(frozen=True, slots=True)
class Expected:
    """The vectors of a job that is to be made.

    Attributes:
        spec: of the job.
        models: the fingerprints of the model's files, as live workers report them. Usually one; none if no worker that
            would take the job is alive.
    """

    spec: JobSpec
    models: frozenset[str]

    @property
    def fingerprint(self) -> str | None:
        """The job's fingerprint, in hexadecimal; None if it is not known."""
        if len(self.models) != 1:
            return None
        (model,) = self.models
        return job_fingerprint(model, self.spec.options)

    def differs(self, about: About, *, same_name: bool) -> str:
        """Why the vectors of an output are others, in words; empty if nothing says so.

        Args:
            same_name: whether the output's model has the same name as the job's.
        """
        mine = deciding(self.spec.options)
        options = sorted(
            name for name in mine.keys() | about.options.keys() if mine.get(name) != about.options.get(name)
        )
        if options:
            return f"it was made with another {options[0]}"
        if about.precision != self.spec.precision:
            return f"its vectors promise {about.precision}, not {self.spec.precision}"
        if self.models and about.model_fingerprint not in self.models:
            return "it was made with other weights, or another tokenizer or pooling"
        if not self.models and not same_name:
            return f"it was made with model {about.model}, not {self.spec.model}"
        return ""


def expected(broker: Broker, spec: JobSpec) -> Expected:
    """What the live workers that would take a job say of its model."""
    entry = broker.settings.models.get(spec.model)
    if entry is not None and entry.fingerprint:
        return Expected(spec, frozenset([entry.fingerprint]))
    queue = keys.queue(spec.hardware, spec.model)
    rows = (row for row in broker.workers.alive(queue) if row.precision == spec.precision)
    served = (row.models.get(spec.model) for row in rows)
    return Expected(spec, frozenset(each.fingerprint for each in served if each is not None))


def has_same_name(broker: Broker, about: About, spec: JobSpec) -> bool:
    """Whether an output's model and a job's have names that mean one model."""
    return same_model(broker.settings, broker.workers, about.model, spec.model)

"""What an output file says of its vectors: enough to tell whether another job would compute the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from embedctl.store import JobStatus
from embedctl_config.errors import OutputError
from embedctl_config.fingerprint import DECIDING_OPTIONS, LATER_OPTIONS, job_fingerprint

#: The entry of a parquet file's footer, and of the file beside an array.
ABOUT = "embedctl.about"


@dataclass(frozen=True, slots=True)
class About:
    """Facts about the vectors of an output.

    Attributes:
        fingerprint: of the job, in hexadecimal: its model's, joined with its options.
        model_fingerprint: of the model, in hexadecimal.
        model: the name under which workers served the model.
        precision: what the vectors promise.
        options: those of the job that determine its vectors.
    """

    fingerprint: str
    model_fingerprint: str
    model: str
    precision: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, job: JobStatus, model_fingerprint: str | None = None) -> Self:
        """The facts of a job whose model is known, because a worker has claimed a chunk of it, or is given here."""
        model = model_fingerprint or job.model_fingerprint or ""
        return cls(job_fingerprint(model, job.options), model, job.model, job.precision, deciding(job.options))

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Self:
        """The facts that :attr:`text` wrote.

        Raises:
            OutputError: it did not write this.
        """
        try:
            facts = json.loads(text)
            about = cls(**{name: facts[name] for name in cls.__dataclass_fields__})
            is_whole = about.fingerprint == job_fingerprint(about.model_fingerprint, about.options)
        except (ValueError, TypeError, LookupError, AttributeError):
            is_whole = False
        if not is_whole:
            raise OutputError(f"{where}: what it says of its vectors is damaged: restore it, or give --force")
        return about

    @property
    def text(self) -> str:
        """The facts as JSON."""
        return json.dumps(asdict(self), sort_keys=True)


def deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a job that determine its vectors."""
    later = {name: options[name] for name in LATER_OPTIONS if options.get(name) is not None}
    return {name: options.get(name) for name in DECIDING_OPTIONS} | later

"""embedctl: turn a corpus into embedding vectors on whatever hardware there is, and lose nothing.

from embedctl import enqueue_embeddings

job = enqueue_embeddings(["first text", "second text"])
job.wait()
job.vectors()  # float32, records × dimensions, in input order

`aenqueue_embeddings` and `AsyncJob` are the asynchronous forms.
"""

from __future__ import annotations

import importlib
import typing

from embedctl_config import __version__
from embedctl_config.errors import (
    BatchFileError,
    BrokerFull,
    BrokerRefused,
    BrokerUnavailable,
    ChunkFilesUnavailable,
    CorpusChanged,
    DestinationRefused,
    DestinationUnavailable,
    DeviceLost,
    EmbedctlError,
    GateFailed,
    GatewayUnavailable,
    HubUnavailable,
    InputError,
    JobAmbiguous,
    JobCancelled,
    JobDamaged,
    JobDrained,
    JobError,
    JobFailed,
    JobHeld,
    JobLost,
    JobNotFound,
    JobStalled,
    JobStopped,
    JobUnfinished,
    MissingExtra,
    ModelError,
    ModelNotFound,
    NotPermitted,
    OtherContract,
    OutputError,
    QuotaExceeded,
    SettingsError,
    UnusableOutput,
    WaitTimeout,
    WireError,
    WireForeign,
    WireTruncated,
    WireVersion,
    WorkerError,
    WorkerSick,
)
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings

if typing.TYPE_CHECKING:
    from embedctl.jobs.aio import AsyncJob, aenqueue_embeddings
    from embedctl.jobs.enqueue import enqueue_embeddings
    from embedctl.jobs.job import Job
    from embedctl.store import Death, JobState, JobStatus, Suspect
    from embedctl.waiting.results import ChunkVectors, FailedRecord, TruncatedRecord

__all__ = [
    "AsyncJob",
    "BatchFileError",
    "BrokerFull",
    "BrokerRefused",
    "BrokerUnavailable",
    "ChunkFilesUnavailable",
    "ChunkVectors",
    "CorpusChanged",
    "Death",
    "DestinationRefused",
    "DestinationUnavailable",
    "DeviceLost",
    "EmbedctlError",
    "FailedRecord",
    "GateFailed",
    "GatewayUnavailable",
    "HubUnavailable",
    "InputError",
    "Job",
    "JobAmbiguous",
    "JobCancelled",
    "JobDamaged",
    "JobDrained",
    "JobError",
    "JobFailed",
    "JobHeld",
    "JobLost",
    "JobNotFound",
    "JobStalled",
    "JobState",
    "JobStatus",
    "JobStopped",
    "JobUnfinished",
    "MissingExtra",
    "ModelError",
    "ModelNotFound",
    "NotPermitted",
    "OtherContract",
    "OutputError",
    "QuotaExceeded",
    "Settings",
    "SettingsError",
    "Suspect",
    "TruncatedRecord",
    "UnusableOutput",
    "WaitTimeout",
    "WireError",
    "WireForeign",
    "WireTruncated",
    "WireVersion",
    "WorkerError",
    "WorkerSick",
    "__version__",
    "aenqueue_embeddings",
    "enqueue_embeddings",
    "load_settings",
]

#: Imported when they are asked for: workers, and commands that only print their help, need none of them.
_LATER = {
    "embedctl.jobs.aio": ("AsyncJob", "aenqueue_embeddings"),
    "embedctl.jobs.enqueue": ("enqueue_embeddings",),
    "embedctl.jobs.job": ("Job",),
    "embedctl.store": ("Death", "JobState", "JobStatus", "Suspect"),
    "embedctl.waiting.results": ("ChunkVectors", "FailedRecord", "TruncatedRecord"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATER.items():
        if name in names:
            value: object = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

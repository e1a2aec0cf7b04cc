"""embedctl: turn a corpus into embedding vectors on whatever hardware there is, and lose nothing.

from embedctl import enqueue_embeddings

job = enqueue_embeddings(["first text", "second text"])
job.wait()
job.vectors()  # float32, records × dimensions, in input order

`aenqueue_embeddings` and `AsyncJob` are the asynchronous forms.
"""

from embedctl.jobs.aio import AsyncJob, aenqueue_embeddings
from embedctl.jobs.enqueue import enqueue_embeddings
from embedctl.jobs.job import Job
from embedctl.store import Death, JobState, JobStatus, Suspect
from embedctl.waiting.results import ChunkVectors, FailedRecord, TruncatedRecord
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

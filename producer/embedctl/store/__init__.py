"""Every Redis access of embedctl: jobs and their chunks, workers and their heartbeats, upkeep."""

from embedctl.store.connection import Connection
from embedctl.store.jobs import (
    Added,
    Claim,
    ClaimAnswer,
    Completed,
    JobSpec,
    JobStore,
)
from embedctl.store.status import JobState, JobStatus
from embedctl.store.upkeep import Upkeep
from embedctl.store.workers import ServedModel, WorkerRegistry, WorkerRow

__all__ = [
    "Added",
    "Claim",
    "ClaimAnswer",
    "Completed",
    "Connection",
    "JobSpec",
    "JobState",
    "JobStatus",
    "JobStore",
    "ServedModel",
    "Upkeep",
    "WorkerRegistry",
    "WorkerRow",
]

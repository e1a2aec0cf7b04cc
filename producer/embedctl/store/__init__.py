"""All access to Redis: jobs and chunks, workers and heartbeats, upkeep. Each step is one atomic script."""

from embedctl.store.answers import Added, Claim, Claimant, Completed, Doubts, Given, InlineJob, JobSpec
from embedctl.store.connection import Connection
from embedctl.store.drains import BatchFacts, Drains, DrainState, Holder, PartFacts
from embedctl.store.heartbeats import Kind, ServedModel, WorkerRow
from embedctl.store.jobs import JobStore
from embedctl.store.status import Death, JobState, JobStatus, Suspect
from embedctl.store.upkeep import Upkeep
from embedctl.store.workers import GoneWorker, Starting, WorkerRegistry

__all__ = [
    "Added",
    "BatchFacts",
    "Claim",
    "Claimant",
    "Completed",
    "Connection",
    "Death",
    "Doubts",
    "DrainState",
    "Drains",
    "GoneWorker",
    "Holder",
    "JobSpec",
    "JobState",
    "JobStatus",
    "JobStore",
    "Kind",
    "PartFacts",
    "ServedModel",
    "Starting",
    "Suspect",
    "Upkeep",
    "WorkerRegistry",
    "WorkerRow",
    "Given",
    "InlineJob",
]

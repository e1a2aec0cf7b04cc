"""Every error that embedctl raises on purpose, and the exit statuses of its commands.

::

    EmbedctlError
    ├── SettingsError             a flag, variable, file entry or argument
    ├── InputError                the corpus
    │   ├── BatchFileError        requests of a batch file
    │   └── CorpusChanged         the corpus is not the one that the job was begun with
    ├── OutputError               the file or the database to write
    │   ├── UnusableOutput        vectors can't go where they are to, as is seen beforehand
    │   ├── OtherContract         the destination is bound to another model's vectors
    │   ├── DestinationRefused    it will never take what it is given
    │   └── DestinationUnavailable it can't be reached, or has no room
    ├── MissingExtra              an optional dependency
    ├── BrokerUnavailable         Redis
    │   ├── BrokerFull            it has no memory left
    │   ├── ChunkFilesUnavailable not Redis, but the place of chunks outside of it
    │   ├── GatewayUnavailable    not Redis, but the gateway in its place
    │   └── BrokerRefused         it answers, and would refuse this each time
    ├── NotPermitted              Redis' access list
    ├── JobError
    │   ├── JobNotFound
    │   │   ├── JobLost           it was there, and Redis lost it or a part of it
    │   │   └── JobAmbiguous      a shortened id fits several jobs
    │   ├── JobUnfinished
    │   ├── JobStalled            its producer died before it had submitted all records
    │   ├── JobCancelled
    │   ├── JobStopped            it takes no more records; its vectors can be fetched
    │   ├── JobDrained            its vectors are in files elsewhere
    │   ├── JobHeld               another process drains it
    │   ├── JobDamaged            another program changed what Redis holds of it
    │   └── JobFailed             its error budget is spent, or it has no vector
    ├── QuotaExceeded             a tenant has as much as it may have
    ├── WaitTimeout
    ├── WireError                 bytes of a chunk or of a result
    │   ├── WireTruncated
    │   ├── WireForeign
    │   └── WireVersion
    ├── ModelError
    │   ├── ModelNotFound
    │   ├── HubUnavailable        the hub that a model is downloaded from
    │   └── GateFailed            its vectors are not what the class promises
    └── WorkerError               a worker or a private Redis that does not start
        ├── DeviceLost            a device that this process can no longer use
        └── WorkerSick            a worker that can no longer encode what it could at its start
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Self

from embedctl_config.printable import printable

#: Extras whose packages are mere placeholders on PyPI.
_ELSEWHERE = ("neuron", "tensorrt")


class ExitStatus(IntEnum):
    """What the exit status of a command means. Those from 64 to 78 are of sysexits.h, 124 is that of timeout(1)."""

    #: One clause for the documentation.
    meaning: str

    def __new__(cls, status: int, meaning: str) -> Self:
        made = int.__new__(cls, status)
        made._value_ = status
        made.meaning = meaning
        return made

    SUCCESS = 0, "success: every record that the command waited for has its vector"
    FAILURE = 1, "the job failed, was stopped or was cancelled, or an error without a status of its own"
    USAGE = 2, "a wrong option, argument, setting or corpus"
    SOME_FAILED = 3, "some records failed; all others have their vectors"
    NOT_FOUND = 4, "there is no such job or model"
    INACCURATE = (
        65,
        "a worker's vectors differ from those of its model by more than its class allows, or a database holds another "
        "model's vectors",
    )
    UNAVAILABLE = (
        69,
        "Redis, or the database of -o, can't be reached, refuses the connection or a command, or is full; or no hub "
        "for `pull`",
    )
    HUNG = 70, "an encode hung, and the worker ended itself"
    CANNOT_ENCODE = 71, "a worker can no longer encode, because its device or its host failed; a new process may"
    QUOTA_EXCEEDED = 75, "a tenant has as many jobs, or as much waiting, as it may: try again later"
    NOT_PERMITTED = 77, "Redis' access list does not permit this user to do that"
    TIMED_OUT = 124, "the wait timed out; the job goes on"
    INTERRUPTED = 130, "Ctrl-C; the message says what happens to the job"


class EmbedctlError(Exception):
    """The root of every error that embedctl raises on purpose."""

    #: The exit status of a command that ends with this error.
    exit_code: int = ExitStatus.FAILURE


class SettingsError(EmbedctlError, ValueError):
    """Raised when a flag, an environment variable, a configuration entry or an argument is not valid."""

    exit_code = ExitStatus.USAGE


class InputError(EmbedctlError, ValueError):
    """Raised when the corpus can't be read as records; the message names the line, the field and the fix.

    The message quotes the corpus, so control characters in it are escaped.

    Args:
        more: further lines of the message.
    """

    exit_code = ExitStatus.USAGE

    def __init__(self, message: str, *more: str) -> None:
        super().__init__("\n".join(map(printable, (message, *more))))


class BatchFileError(InputError):
    """Raised when requests of an OpenAI batch file are refused; nothing of the file is queued.

    Args:
        data: for each request that the message names, its error as OpenAI's batch service gives it: `code`, `message`,
            `param` and `line`.
    """

    def __init__(self, message: str, *more: str, data: Sequence[Mapping[str, object]]) -> None:
        super().__init__(message, *more)
        self.data = list(data)


class CorpusChanged(InputError):
    """Raised when a job is resumed with other records or options than those with which it was begun."""


class OutputError(EmbedctlError):
    """Raised when vectors can't be written; no incomplete file is left under the final name."""


class UnusableOutput(OutputError):
    """Raised when vectors can't go to a file, a folder or a bucket, which is seen before anything is written: it is not
    there, may not be written, or holds something else."""

    exit_code = ExitStatus.USAGE


class OtherContract(OutputError):
    """Raised when a destination is bound to the vectors of another model, or to those made with other options, than the
    job's; nothing is written."""

    exit_code = ExitStatus.INACCURATE


class DestinationRefused(OutputError):
    """Raised when a destination will never take what it is given. A delivery finds the records that this is about, and
    goes on with the others."""


class DestinationUnavailable(OutputError, ConnectionError):
    """Raised when a destination can't be reached, refuses the connection, or has no room. The same call resumes."""

    exit_code = ExitStatus.UNAVAILABLE


class MissingExtra(EmbedctlError, ImportError):
    """Raised when an optional dependency is not installed; the message contains the `pip install` command."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs an optional dependency: pip install 'embedctl[{extra}]'"
            + (f" with the vendor's own package index (docs/{extra}.md)" if extra in _ELSEWHERE else "")
        )
        self.extra = extra


class BrokerUnavailable(EmbedctlError, ConnectionError):
    """Raised when Redis can't be reached, refuses the connection or a command, or has no memory left."""

    exit_code = ExitStatus.UNAVAILABLE


class BrokerFull(BrokerUnavailable):
    """Raised when Redis has reached its maxmemory. Producers and workers wait until it has memory again."""


class ChunkFilesUnavailable(BrokerUnavailable):
    """Raised when the place of chunks outside of Redis (`chunk_files`) can't be reached, is full, or refuses.

    Whoever waits for Redis waits for it too.
    """


class GatewayUnavailable(BrokerUnavailable):
    """Raised when the gateway that takes Redis' place (`url`) can't be reached, has no Redis, or is too busy.

    Whoever waits for Redis waits for it too.

    Args:
        retry_after_s: how long the gateway asks its caller to wait (seconds).
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BrokerRefused(BrokerUnavailable):
    """Raised when Redis answers, and refuses a command that it would refuse each time, so a retry is of no use.

    A refusal that may pass (Redis is loading, or has become a replica) is a plain :class:`BrokerUnavailable`.
    """


class NotPermitted(EmbedctlError):
    """Raised when Redis' access list does not permit this user to do what was asked; another user may be permitted."""

    exit_code = ExitStatus.NOT_PERMITTED


class JobError(EmbedctlError):
    """The root of errors about one job."""


class JobNotFound(JobError, LookupError):
    """Raised when Redis knows no job of that id: it never existed here, was freed, or its time to live ran out."""

    exit_code = ExitStatus.NOT_FOUND


class JobLost(JobNotFound):
    """Raised when Redis was emptied after the job was made, or lost some of its chunks."""


class JobAmbiguous(JobNotFound):
    """Raised when a shortened id is the beginning or the ending of several jobs' ids; the message names them."""

    exit_code = ExitStatus.USAGE


class JobUnfinished(JobError):
    """Raised when the vectors of a job are asked for before it has ended."""


class JobStalled(JobError):
    """Raised when the producer of an awaited job died before it had submitted all records.

    To resume the submission, submit the same corpus with `--resume` and the job's id or its idempotency key.
    """


class JobCancelled(JobError):
    """Raised when a caller wants the vectors of a cancelled job, or adds or retries records of it."""


class JobStopped(JobError):
    """Raised when a caller adds or retries records of a job that was stopped. Its vectors can be fetched."""


class JobDrained(JobError):
    """Raised when vectors of a drained job are asked for where its parts can't be read; the message says where they
    are."""


class JobHeld(JobError):
    """Raised when a job is to be drained while another process does that; the message names the process."""


class JobFailed(JobError):
    """Raised when more records of a job failed than its error budget (`max_errors`) allows, which ended the job.

    `vectors()` raises it also when every record failed; `wait()`, `iter_results()` and `errors()` do not.
    """


class JobDamaged(JobError):
    """Raised when what Redis holds of a job was lost or changed by another program; the message names the key."""


class QuotaExceeded(EmbedctlError):
    """Raised when a new job is refused, because its tenant has as many jobs, or as much waiting, as it may have, or has
    begun as much in this second as it may.

    A job that has begun is not refused: it waits for room.

    Args:
        limit: the name of the limit; `most` is its value, and `used` is what the tenant has.
        after_s: seconds after which there is room, if that is known; otherwise 0.
        is_final: whether there never is room, because the job alone would exceed the limit; `used` is what it needs.
    """

    exit_code = ExitStatus.QUOTA_EXCEEDED

    def __init__(
        self,
        message: str,
        *,
        tenant: str,
        limit: str,
        most: int,
        used: int,
        after_s: float = 0.0,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.tenant, self.limit, self.most, self.used = tenant, limit, most, used
        self.after_s, self.is_final = after_s, is_final


class WaitTimeout(EmbedctlError, TimeoutError):
    """Raised when a wait reaches its timeout. An awaited job goes on."""

    exit_code = ExitStatus.TIMED_OUT


class WireError(EmbedctlError, ValueError):
    """The root of errors about the bytes of a chunk."""


class WireTruncated(WireError):
    """Raised when a chunk's bytes end before what their header promises."""


class WireForeign(WireError):
    """Raised when bytes are not a chunk of embedctl's, or are inconsistent."""


class WireVersion(WireError):
    """Raised when an embedctl of another version wrote a chunk."""


class ModelError(EmbedctlError):
    """Raised when a model can't be loaded, or the backend does not support its kind."""


class ModelNotFound(ModelError, LookupError):
    """Raised when a model is neither a local folder, nor an installed package, nor in the hub's cache."""

    exit_code = ExitStatus.NOT_FOUND


class HubUnavailable(ModelError):
    """Raised when the hub that a model is to be downloaded from can't be reached, or must not be asked."""

    exit_code = ExitStatus.UNAVAILABLE


class GateFailed(ModelError):
    """Raised when a backend's vectors are not what its class promises; the message is the table of differences."""

    exit_code = ExitStatus.INACCURATE


class WorkerError(EmbedctlError):
    """Raised when a worker, its device or the private Redis can't be started.

    Args:
        exit_code: that of the child process that ended, if there was one.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class DeviceLost(WorkerError):
    """Raised when a device no longer answers this process; the work on it is lost. A new process may use the device."""

    exit_code = ExitStatus.CANNOT_ENCODE


class WorkerSick(WorkerError):
    """Raised when a worker can no longer encode its own test text as at its start, so no record is to blame."""

    exit_code = ExitStatus.CANNOT_ENCODE

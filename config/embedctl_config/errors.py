"""Every error that embedctl raises on purpose.

::

    EmbedctlError
    ├── SettingsError             a flag, variable, file entry or argument
    ├── InputError                the corpus
    │   └── CorpusChanged         the corpus is not the one that the job was begun with
    ├── OutputError               the file to write
    ├── MissingExtra              an optional dependency
    ├── BrokerUnavailable         Redis
    │   ├── BrokerFull            it has no memory left
    │   └── BrokerRefused         it answers, and will not do this whenever it is asked
    ├── NotPermitted              Redis' access list
    ├── JobError
    │   ├── JobNotFound
    │   │   └── JobLost           it was there, and Redis lost it or a part of it
    │   ├── JobUnfinished
    │   ├── JobStalled            nobody submits the rest of it any more
    │   ├── JobCancelled
    │   └── JobFailed
    ├── WaitTimeout
    ├── WireError                 bytes of a chunk or of a result
    │   ├── WireTruncated
    │   ├── WireForeign
    │   └── WireNewer
    ├── ModelError
    │   ├── ModelNotFound
    │   └── GateFailed            its vectors are not what the class promises
    └── WorkerError               a worker or a private Redis that does not start
        ├── DeviceLost            a device that answers no more
        └── WorkerSick            a worker that can't do any more what it could at its start
"""

from __future__ import annotations

from embedctl_config.printable import printable

#: Extras whose packages are mere placeholders on PyPI.
_ELSEWHERE = ("neuron", "tensorrt")


class EmbedctlError(Exception):
    """The root of every error that embedctl raises on purpose."""

    #: The exit status that the command line gives for this error.
    exit_code: int = 1


class SettingsError(EmbedctlError, ValueError):
    """Raised when a flag, an environment variable, a configuration entry or an argument is not valid."""

    exit_code = 2


class InputError(EmbedctlError, ValueError):
    """Raised when the corpus can't be read as records; the message names the line, the field and the fix.

    The message quotes the corpus, and so is made printable.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class CorpusChanged(InputError):
    """Raised when a job is resumed with records or options other than those it was begun with."""


class OutputError(EmbedctlError):
    """Raised when vectors can't be written; nothing half-written is left under the final name."""


class MissingExtra(EmbedctlError, ImportError):
    """Raised when an optional dependency is not installed; the message holds the `pip install` that mends it."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs an optional dependency: pip install 'embedctl[{extra}]'"
            + (f" with the vendor's own package index (docs/{extra}.md)" if extra in _ELSEWHERE else "")
        )
        self.extra = extra


class BrokerUnavailable(EmbedctlError, ConnectionError):
    """Raised when Redis can't be reached, refuses us, or can't take more."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


class BrokerFull(BrokerUnavailable):
    """Raised when Redis has reached its maxmemory. Producers and workers wait until it has room again."""


class BrokerRefused(BrokerUnavailable):
    """Raised when Redis answers and refuses a command as it would every time: nobody asks again.

    What it refuses for the moment (it is loading, or has become a replica) is a :class:`BrokerUnavailable` alone.
    """


class NotPermitted(EmbedctlError):
    """Raised when Redis' access list does not let this user do what was asked; another user may."""

    exit_code = 77  # EX_NOPERM of sysexits.h


class JobError(EmbedctlError):
    """The root of errors about one job."""


class JobNotFound(JobError, LookupError):
    """Raised when Redis knows no job of that id: it never existed here, was freed, or its time ran out."""

    exit_code = 4


class JobLost(JobNotFound):
    """Raised when Redis was emptied after the job was made, or lost some of its chunks."""


class JobUnfinished(JobError):
    """Raised when the vectors of a job are asked for before it has ended."""


class JobStalled(JobError):
    """Raised when a job is waited for whose producer died before it had said that all records are there.

    The same corpus submitted with `--resume`, or with the job's idempotency key, goes on where it stopped.
    """


class JobCancelled(JobError):
    """Raised when the vectors of a cancelled job are asked for or waited for."""


class JobFailed(JobError):
    """Raised when a job was ended by its error budget (`max_errors`)."""


class WaitTimeout(EmbedctlError, TimeoutError):
    """Raised when what was waited for did not come within the time given. A job that is waited for goes on."""

    exit_code = 124  # as timeout(1) exits


class WireError(EmbedctlError, ValueError):
    """The root of errors about the bytes of a chunk."""


class WireTruncated(WireError):
    """Raised when a chunk's bytes end before what their header promises."""


class WireForeign(WireError):
    """Raised when bytes are not a chunk of ours, or contradict themselves."""


class WireNewer(WireError):
    """Raised when a chunk was written by a newer embedctl than this one."""


class ModelError(EmbedctlError):
    """Raised when a model can't be loaded or is of a kind that the backend does not support."""


class ModelNotFound(ModelError, LookupError):
    """Raised when a model is neither a local folder, nor an installed package, nor in the hub's cache."""

    exit_code = 4


class GateFailed(ModelError):
    """Raised when a backend's vectors are not what its class promises; the message is the table of what was found."""

    exit_code = 65  # EX_DATAERR of sysexits.h


class WorkerError(EmbedctlError):
    """Raised when a worker, its device or the private Redis can't be started.

    Where a process of ours said why by its exit status, that is this error's `exit_code` too.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DeviceLost(WorkerError):
    """Raised when a device answers no more, so that only another process can use it: whatever was running is lost."""

    #: EX_OSERR of sysexits.h, as a process ends itself with that has lost its device.
    exit_code = 71

    def __init__(self, message: str) -> None:
        super().__init__(message, type(self).exit_code)


class WorkerSick(WorkerError):
    """Raised when a worker can't encode a text of its own, or no longer as at its start: no record is to blame."""

    #: As for :class:`DeviceLost`: another process may do what this one can't.
    exit_code = 71

    def __init__(self, message: str) -> None:
        super().__init__(message, type(self).exit_code)

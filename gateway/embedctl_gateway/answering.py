"""The files of a batch that has ended: its answers, and the errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import orjson

from embedctl.job import Job
from embedctl.output.batch import Answer, Answers
from embedctl.output.not_run import ReadRequests, Reason
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import FileStore, PartWriter, StoredFile
from embedctl_config.errors import EmbedctlError, JobCancelled, JobFailed

_PURPOSE = "batch_output"


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a batch, which nobody sees yet.

    Attributes:
        output, error: None if they would be empty.
        completed, failed: requests with and without vectors.
        tokens: how many were encoded.
    """

    output: StoredFile | None
    error: StoredFile | None
    completed: int
    failed: int
    tokens: int

    @property
    def files(self) -> list[StoredFile]:
        """Those that there are."""
        return [file for file in (self.output, self.error) if file is not None]


class AnswerFiles:
    """Writes the answers to a batch, chunk by chunk.

    Args:
        check: called after each chunk; what it raises ends the writing, and what was written is removed.
    """

    def __init__(self, files: FileStore, batch: StoredBatch, check: Callable[[], None]) -> None:
        self._output, self._error = files.writer(), files.writer()
        self._batch = batch
        self._check = check
        self._completed = self._failed = self._tokens = 0

    def write(self, job: Job | None, read: ReadRequests | None, reason: Reason) -> Written:
        """Write the answers of a job that has ended.

        Args:
            job: None if nothing was run.
            read: reads the requests; None if they are gone.
            reason: why requests were not run.

        Raises:
            JobNotFound: the job, or a result of it, is gone.
            BrokerUnavailable: Redis can't be reached, or the place of files.
        """
        try:
            if job is not None:
                self._write(job, Answers(job.status(), job.status, read, reason=reason))
            elif read is not None:
                self._write_none(read, reason)
            return self._written()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written."""
        for writer in (self._output, self._error):
            with suppress(EmbedctlError):  # it goes with its time to live
                writer.discard()

    def _write(self, job: Job, answers: Answers) -> None:
        try:
            for chunk in job.iter_results():
                self._tokens += 0 if chunk.tokens is None else int(chunk.tokens.sum())
                self._take(answers.of(chunk))
                self._check()
        except JobFailed:
            pass  # somebody gave it an error budget, and what is done is there
        except JobCancelled as error:
            if not answers.give_up(error):
                raise
        self._take(answers.end())

    def _write_none(self, read: ReadRequests, reason: Reason) -> None:
        for number, (custom_id, _) in enumerate(read()):
            line = {"id": f"batch_req_{self._batch.id}_{number}", "custom_id": custom_id}
            self._error.add(orjson.dumps({**line, "response": None, "error": reason._asdict()}) + b"\n")
            self._failed += 1
            self._check()

    def _take(self, found: Iterable[Answer]) -> None:
        for answer in found:
            writer = self._error if answer.failed else self._output
            writer.add(answer.line + b"\n")
            self._completed += not answer.failed
            self._failed += answer.failed

    def _written(self) -> Written:
        output, error = self._finished(self._output, "output"), self._finished(self._error, "error")
        return Written(output, error, self._completed, self._failed, self._tokens)

    def _finished(self, writer: PartWriter, what: str) -> StoredFile | None:
        if not writer.size:
            return None
        return writer.finish(
            tenant=self._batch.tenant,
            name=f"{self._batch.id}_{what}.jsonl",
            purpose=_PURPOSE,
            ttl_s=self._batch.number("output_ttl_s"),
        )

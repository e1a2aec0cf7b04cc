"""The file that answers a batch file, and the one of its failed requests beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from embedctl.destinations.answers import Answer, Answers
from embedctl.destinations.unfinished import LineFile, part_of, publish
from embedctl.destinations.writer import Content, Writer
from embedctl.results import ChunkVectors
from embedctl_config.errors import JobError


def errors_beside(path: Path) -> Path:
    """The file of the failed requests: `results.errors.jsonl` for `results.jsonl`."""
    return path.with_name(f"{path.stem}.errors.jsonl")


class BatchWriter(Writer):
    """Writes the lines of :class:`Answers`: those of failed requests to the file beside, unless there is only one file.

    The file beside exists only if a request failed.
    """

    def __init__(self, content: Content, make_answers: Callable[[], Answers], *, one_file: bool) -> None:
        self._answers = make_answers()
        self._results = LineFile(content.path)
        self._errors = None if one_file else LineFile(errors_beside(content.path))
        self._failed = 0
        self.paths = [file.path for file in self._files()]

    def write(self, chunk: ChunkVectors) -> None:
        self._write(self._answers.of(chunk))

    def gives_up(self, error: JobError) -> bool:
        return self._answers.give_up(error)

    def finish(self) -> list[Path]:
        self._write(self._answers.end())
        self.close()
        written = [self._results.path]
        if self._errors is not None and self._failed:
            publish(self._errors.path)
            written.append(self._errors.path)
        elif self._errors is not None:
            part_of(self._errors.path).unlink()
            self._errors.path.unlink(missing_ok=True)
        publish(self._results.path)
        return written

    def close(self) -> None:
        for file in self._files():
            file.close()

    def _write(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            if answer.failed and self._errors is not None:
                self._failed += 1
                self._errors.write(answer.line)
            else:
                self._results.write(answer.line)

    def _files(self) -> list[LineFile]:
        return [self._results] if self._errors is None else [self._results, self._errors]

"""What a line of a log looks like to people and to programs, and that no error in it quotes a text."""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from embedctl_config.errors import ModelError
from embedctl_workers.redaction import redacted, redacted_exc_info
from embedctl_workers.serving import logs

log = logging.getLogger("embedctl_workers.somewhere")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The root logger is pytest's too."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("log_format", "terminal", "level", "as_json", "bells"),
    [
        ("auto", True, "info", False, False),
        ("auto", True, "debug", False, True),
        ("auto", False, "info", True, True),
        ("text", True, "info", False, False),
        ("text", False, "info", False, True),
        ("json", True, "info", True, True),
    ],
)
def test_a_terminal_gets_text_without_the_lines_of_each_bell_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, log_format: str, terminal: bool, level: str, as_json: bool, bells: bool
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure("text", "info")
    logs.configure(log_format, level)
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).info("Task received")
        logging.getLogger(name).warning("Task lost")
    assert ("Task received" in stream.getvalue()) is bells
    assert stream.getvalue().count("Task lost") == 2
    assert stream.getvalue().startswith("{") is as_json


def lines(shown: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in shown.splitlines()]


def test_a_json_line_says_when_how_bad_where_what_and_of_which_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info", worker="cpu:0-3@host")
    before = datetime.now(UTC)
    log.warning("no progress for %d s", 12, extra={"job": "j1", "chunk": 0, "attempt": 2})
    (line,) = lines(capsys.readouterr().err)
    at = datetime.fromisoformat(str(line.pop("time")))
    assert before - timedelta(milliseconds=1) <= at <= datetime.now(UTC)  # it is told in whole milliseconds
    assert line == {
        "level": "WARNING",
        "logger": "embedctl_workers.somewhere",
        "message": "no progress for 12 s",
        "job": "j1",
        "chunk": 0,
        "attempt": 2,
        "worker": "cpu:0-3@host",
    }


def test_one_record_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info")
    # The surrogate is no part of the message: pytest sends that, as UTF-8, from the process that runs the test.
    log.info("a table\nof two lines, “quoted”", extra={"job": "\ud800", "chunk": {1, 2}})
    shown = capsys.readouterr().err
    (line,) = lines(shown)
    assert (line["message"], line["job"]) == ("a table\nof two lines, “quoted”", "\ud800")
    assert line["chunk"] == "{1, 2}"
    assert shown.isascii()  # whatever the encoding of standard error is


def divide(text: str) -> float:
    return len(text) / 0


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_an_exception_has_frames_and_no_values(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    logs.configure(log_format, "info")
    secret = "a record's " + "text"
    try:
        divide(secret)
    except ZeroDivisionError:
        log.exception("failed", extra={"job": "j1"})
    shown = capsys.readouterr().err
    assert "in divide" in shown
    assert secret not in shown
    if log_format == "json":
        (line,) = lines(shown)
        exception = line["exception"]
        assert isinstance(exception, dict)
        assert exception["type"] == "ZeroDivisionError"
        assert exception["traceback"].startswith("Traceback (most recent call last):")


def test_a_warning_of_a_library_is_a_line_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # pytest has its own hook
        warnings.warn("deprecated", stacklevel=1)
    (line,) = lines(capsys.readouterr().err)
    assert line["level"] == "WARNING"
    assert "deprecated" in str(line["message"])


SECRET = "the text of a record"


def fail_twice() -> None:
    try:
        dict[str, str]()[SECRET]
    except KeyError as error:
        error.add_note(SECRET)
        raise ValueError(f"can't encode {SECRET!r}") from error


def caught() -> ValueError:
    with pytest.raises(ValueError, match=SECRET) as raised:
        fail_twice()
    return raised.value


def test_a_message_of_embedctl_quotes_nothing_and_is_shown() -> None:
    assert redacted(ModelError("this model was closed")) == "ModelError: this model was closed"


def test_the_log_has_every_traceback_and_no_message(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("test").error("failed", exc_info=redacted_exc_info(caught()))
    assert SECRET not in caplog.text
    assert caplog.text.count("in fail_twice") == 2
    assert "ValueError; its message may quote a text" in caplog.text
    assert "KeyError; its message may quote a text" in caplog.text


def test_errors_that_cause_one_another_in_a_circle_come_to_an_end() -> None:
    one, two = RuntimeError(SECRET), ValueError(SECRET)
    one.__cause__, two.__cause__ = two, one
    depth, at = 0, redacted_exc_info(one)[1]
    while at.__cause__ is not None:
        depth, at = depth + 1, at.__cause__
    assert depth == 10

"""An error that quotes a text is shown without the text."""

from __future__ import annotations

import logging

import pytest

from embedctl_config.errors import ModelError
from embedctl_workers.redaction import first_line, redacted, redacted_exc_info

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


def test_the_kind_and_the_place_are_shown() -> None:
    shown = redacted(caught())
    assert shown.startswith("ValueError in fail_twice (test_redaction.py, line ")
    assert SECRET not in shown


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


def test_the_record_itself_may_quote_its_text_but_not_all_of_it() -> None:
    assert first_line(ValueError(f"{'x' * 500}\n{SECRET}")) == f"ValueError: {'x' * 200}"

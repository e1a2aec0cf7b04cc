"""Logs on standard error: lines for people on a terminal, elsewhere one JSON object per line for programs.

Fields say what a line is about: `extra={"job": …, "chunk": …, "attempt": …}`. No text of a record is ever logged.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
import warnings
from datetime import UTC, datetime
from typing import Any

from embedctl_config.printable import PrintableFormatter, printable

#: The fields that `extra` may give a line, in the order in which they are shown; `worker` defaults to this process.
FIELDS = ("job", "chunk", "attempt", "worker")
_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Celery's loggers that log two lines for each bell.
_OF_EACH_BELL = ("celery.worker.strategy", "celery.app.trace")
#: The beginning of Celery's six-line warning to root. Whoever reads a terminal as root knows that.
_AS_ROOT = "You're running the worker with superuser privileges"


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found = {name: getattr(record, name, None) for name in FIELDS}
    return {name: value for name, value in found.items() if value is not None}


class _TextFormatter(PrintableFormatter):
    """`time level logger: message`, with the fields as `name=value` at the end of the first line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        first, line_end, rest = super().formatMessage(record).partition("\n")
        fields = "".join(f" {name}={printable(str(value))}" for name, value in _fields_of(record).items())
        return f"{first}{fields}{line_end}{rest}"


class _JsonFormatter(logging.Formatter):
    """One JSON object: `time` (UTC), `level`, `logger`, `message`, the fields, and `exception` if there was one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info and record.exc_info[0]:
            kind, error, trace = record.exc_info
            line["exception"] = {
                "type": kind.__qualname__,
                "traceback": "".join(traceback.format_exception(kind, error, trace)),
            }
        # A value that JSON can't hold is shown as text, so that no line is lost because of a field.
        return json.dumps(line, default=str)


class _Handler(logging.StreamHandler[Any]):
    """embedctl's handler; its class distinguishes it from other handlers. `worker` is the name of this worker; empty if
    this process is none."""

    def __init__(self, *, as_json: bool, worker: str) -> None:
        super().__init__(sys.stderr)
        self.worker = worker
        self.setFormatter(_JsonFormatter() if as_json else _TextFormatter(_LINE))

    def format(self, record: logging.LogRecord) -> str:
        record.worker = getattr(record, "worker", None) or self.worker or None
        return super().format(record)


def configure(log_format: str, level: str, *, worker: str = "") -> None:
    """Log to standard error from now on; a second call replaces the first.

    Args:
        log_format: text, json, or auto: text on a terminal, json elsewhere.
        level: the lowest level that is logged, in lower or upper case. On a terminal, text leaves out Celery's lines
            about each bell, unless the level is debug.
        worker: the worker's name in each line; see :func:`set_worker`.
    """
    root = logging.getLogger()
    for handler in _ours():
        root.removeHandler(handler)
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    root.addHandler(_Handler(as_json=as_json, worker=worker))
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for_a_reader = not as_json and sys.stderr.isatty() and level.upper() != "DEBUG"
    for name in _OF_EACH_BELL:
        logging.getLogger(name).setLevel(logging.WARNING if for_a_reader else logging.NOTSET)
    if for_a_reader:
        warnings.filterwarnings("ignore", message=_AS_ROOT)


def set_worker(name: str) -> None:
    for handler in _ours():
        handler.worker = name


def _ours() -> list[_Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]

"""Writes vectors to files. A file gets its final name only when it is complete."""

from embedctl.output.batch import errors_beside, is_of_batch
from embedctl.output.fetch import FORMATS, check_output, fetch, files_of, guess_format, holds_kept_fields
from embedctl.output.numbers import FLOAT32, Numbers, OutputType, load_ranges
from embedctl.output.standard import is_stdout

__all__ = [
    "FLOAT32",
    "FORMATS",
    "Numbers",
    "OutputType",
    "check_output",
    "errors_beside",
    "fetch",
    "files_of",
    "guess_format",
    "holds_kept_fields",
    "is_of_batch",
    "is_stdout",
    "load_ranges",
]

"""Vectors into files. Nothing half-written ever bears a final name."""

from embedctl.output.fetch import FORMATS, check_output, fetch, guess_format

__all__ = ["FORMATS", "check_output", "fetch", "guess_format"]

"""Vectors into files. Nothing half-written ever bears a final name."""

from embedctl.output.fetch import FORMATS, fetch, guess_format

__all__ = ["FORMATS", "fetch", "guess_format"]

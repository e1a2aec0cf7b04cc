"""Opens an earlier output, of whatever format it is."""

from __future__ import annotations

from pathlib import Path

from embedctl.changes.earlier import Earlier
from embedctl.destinations.npy import about_beside
from embedctl.destinations.numbers import Numbers
from embedctl.destinations.unfinished import is_begun
from embedctl_config.errors import SettingsError


def open_earlier(path: Path, numbers: Numbers | None) -> Earlier | None:
    """An earlier output, a .parquet or a .npy; None if there is none yet, or only a part of it.

    Args:
        numbers: how the new output stores vectors.

    Raises:
        OutputError: it is damaged, or has no digests.
        SettingsError: its format is another one, or it stores its vectors in another way.
        MissingExtra: a package for it is not installed.
    """
    if path.suffix == ".parquet":
        from embedctl.changes.earlier_parquet import ParquetEarlier

        return ParquetEarlier(path, numbers) if path.exists() else None
    if path.suffix == ".npy":
        from embedctl.changes.earlier_npy import NpyEarlier

        # Its files have their names one after the other, so a writer that died in between leaves a mixture.
        is_whole = path.exists() and (about_beside(path).exists() or not is_begun(path))
        return NpyEarlier(path, numbers) if is_whole else None
    raise SettingsError(f"--sync takes a .parquet, a .npy or the URL of a database, and {path} is none")

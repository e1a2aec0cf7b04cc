"""Opens an earlier output, of whatever format it is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from embedctl.changes.earlier import Earlier
from embedctl.destinations.place import MANIFEST
from embedctl.destinations.registry import place_of
from embedctl.output.numbers import Numbers
from embedctl_config.errors import OutputError, SettingsError


def open_earlier(path: str, numbers: Numbers | None) -> Earlier:
    """An earlier output: a .parquet, a .npy, or a folder of parts.

    Args:
        numbers: how the new output stores vectors.

    Raises:
        OutputError: it is not there, is damaged, has no digests, or is not complete.
        SettingsError: its format is another one, or it stores its vectors in another way.
        MissingExtra: a package for it is not installed.
    """
    where = Path(path)
    if path.endswith("/") or "://" in path or where.is_dir():
        from embedctl.changes.earlier_parquet import ParquetEarlier

        place = place_of(path)
        try:
            names = place.names()
        except OSError as error:
            raise OutputError(f"{path} can't be read: {error.strerror or error}") from error
        parts = [name for name in names if name != MANIFEST]
        if MANIFEST not in names or not parts:
            raise OutputError(
                f"{path} holds no complete output, because it has no {MANIFEST}: wait for the drain that fills it, or "
                "fetch its job there once more"
            )
        return ParquetEarlier(path, [(place.path_of(name), partial(place.source, name)) for name in parts], numbers)
    if not where.exists():
        raise OutputError(f"{path} is not there: name an earlier output, or omit --since")
    if where.suffix == ".parquet":
        from embedctl.changes.earlier_parquet import ParquetEarlier

        return ParquetEarlier(path, [(path, lambda: where)], numbers)
    if where.suffix == ".npy":
        from embedctl.changes.earlier_npy import NpyEarlier

        return NpyEarlier(where, numbers)
    raise SettingsError(f"--since takes a .parquet, a .npy or a folder of parts, and {path} is none")

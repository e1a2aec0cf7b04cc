"""pyarrow, for everything that writes or reads parquet. MissingExtra: it is not installed."""

from __future__ import annotations

from embedctl_config.errors import MissingExtra

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise MissingExtra("parquet", "parquet") from error

__all__ = ["pa", "pq"]

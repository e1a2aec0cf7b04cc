"""Types of parquet columns: the narrowest that loses nothing of the values seen."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from embedctl.destinations.parquet import KeptColumns


@pytest.mark.parametrize(
    ("values", "dtype", "column"),
    [
        ([], pa.string(), []),
        ([None, None], pa.string(), [None, None]),
        ([True, None], pa.bool_(), [True, None]),
        ([1, None, -(2**63)], pa.int64(), [1, None, -(2**63)]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([2**53, 2.5], pa.float64(), [2.0**53, 2.5]),
        ([2**53 + 1, 2.5], pa.string(), ["9007199254740993", "2.5"]),
        ([2**63], pa.string(), ["9223372036854775808"]),
        ([1, True], pa.string(), ["1", "true"]),
        (["a", 1, None, [1, "ü"], {"b": None}], pa.string(), ["a", "1", None, '[1,"ü"]', '{"b":null}']),
    ],
    ids=repr,
)
def test_a_column_has_the_narrowest_type_that_loses_nothing(values: list[Any], dtype: Any, column: list[Any]) -> None:
    columns = KeptColumns(["x"])
    rows = [{"x": value} for value in values]
    columns.widened_by(rows)
    assert columns.fields() == [("x", dtype)]
    (array,) = columns.arrays(rows)
    assert (array.type, array.to_pylist()) == (dtype, column)

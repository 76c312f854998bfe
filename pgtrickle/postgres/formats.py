"""Formats of rows in flight: how Arrow reads the output of COPY, and what Spark calls its types."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import csv

PARSE = csv.ParseOptions(newlines_in_values=True)
WRITE = csv.WriteOptions(include_header=False, quoting_style="all_valid")

_TYPES = {"STRING": pa.string(), "BOOLEAN": pa.bool_(), "BIGINT": pa.int64()}


def conversion(schema: pa.Schema) -> csv.ConvertOptions:
    """Options for reading CSV: an empty field is NULL, a quoted one never is."""
    return csv.ConvertOptions(
        column_types=schema,
        null_values=[""],
        true_values=["t"],
        false_values=["f"],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )


def spark_types(schema: pa.Schema) -> list[tuple[str, str]]:
    """Column names with their Spark types."""
    return [(field.name, _spark_type(field.type)) for field in schema]


def _spark_type(type_: pa.DataType) -> str:
    if pa.types.is_decimal(type_):
        return f"DECIMAL({type_.precision},{type_.scale})"
    return next(name for name, known in _TYPES.items() if known == type_)


def arrow_type(name: str) -> pa.DataType:
    if name.startswith("DECIMAL"):
        precision, scale = name.removeprefix("DECIMAL(").removesuffix(")").split(",")
        return pa.decimal128(int(precision), int(scale))
    return _TYPES[name]

"""`import pgtrickle` is cheap: it loads neither a database driver nor Spark."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pgtrickle

LOADED = "import sys, pgtrickle; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
TIMED = "import time; t = time.perf_counter(); import pgtrickle; print(time.perf_counter() - t)"


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_import_loads_no_heavy_library() -> None:
    loaded = set(run_python(LOADED).split())
    assert "pgtrickle" in loaded
    assert not loaded & {"pyspark", "py4j", "psycopg", "pyarrow", "sqlglot"}


def test_import_takes_less_than_a_tenth_of_a_second() -> None:
    # The best of three: a busy machine may delay one run, not make a slow import fast.
    assert min(float(run_python(TIMED)) for _ in range(3)) < 0.1


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = pgtrickle.no_such_name


def test_public_names_are_listed() -> None:
    assert {"Database", "RefreshResult", "StreamTable", "connect"} <= set(dir(pgtrickle))

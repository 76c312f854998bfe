"""`pgtrickle prepare`: Java can use the file that it creates, and commands start Spark with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

_START = "from pgtrickle.spark.session import spark_session; print(spark_session().range(3).count())"


def test_spark_starts_from_the_file(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", "from pgtrickle.cli.main import main; main()", "prepare", "--json"]
    made = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    path = Path(made["file"])
    assert path.stat().st_size == made["bytes"] > 1_000_000
    assert list(path.parent.iterdir()) == [path]
    # So told, Java ends where it cannot use the file, as the second start shows.
    environment["SPARK_SUBMIT_OPTS"] = "-Xshare:on"
    start = [sys.executable, "-c", _START]
    assert subprocess.run(start, env=environment, check=True, capture_output=True, text=True).stdout.strip() == "3"
    path.chmod(0o600)
    path.write_bytes(b"no classes")
    assert subprocess.run(start, env=environment, check=False, capture_output=True).returncode != 0

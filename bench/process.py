"""`pgtrickle run` as a process of its own, for measurements."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg


@contextmanager
def service_process(dsns: Sequence[str], lease_seconds: float = 10.0) -> Iterator[subprocess.Popen[bytes]]:
    """A service for these databases of one server, killed at the end."""
    databases = [psycopg.conninfo.conninfo_to_dict(dsn)["dbname"] for dsn in dsns]
    program = "from pgtrickle.cli.main import main; main()"
    with tempfile.TemporaryDirectory(prefix="pgtrickle-bench-") as directory:
        config = Path(directory) / "pgtrickle.toml"
        config.write_text(
            f'[service]\nhttp = ""\nlease_seconds = {lease_seconds:.0f}\n[servers.main]\ndsn = {json.dumps(dsns[0])}\n'
            f"databases = {json.dumps(databases)}\n"
        )
        with config.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program, "run", "--config", str(config)], stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

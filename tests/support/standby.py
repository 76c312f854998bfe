"""A real streaming replica of a test server."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from pgtrickle.embedded.account import hand_over, server_account
from pgtrickle.embedded.binaries import find_binaries
from pgtrickle.embedded.server import EmbeddedServer

Connection = psycopg.Connection[Any]


@contextmanager
def standby_of(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Run a streaming replica of the whole server."""
    account = server_account()
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-standby-"))
    hand_over(base, account)
    try:
        subprocess.run(
            [
                find_binaries(server.version) / "pg_basebackup",
                "-D",
                base / "data",
                "-d",
                server.dsn(),
                "-R",
                "-c",
                "fast",
            ],
            check=True,
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            cwd=base,
        )
        with EmbeddedServer(base / "data", version=server.version, settings=server.settings) as standby:
            yield standby
    finally:
        shutil.rmtree(base)


def await_replay(primary: Connection, standby: Connection) -> None:
    """Wait until the standby has replayed everything that the primary has written so far."""
    row = primary.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    deadline = time.monotonic() + 30
    while standby.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", row).fetchone() != (True,):
        assert time.monotonic() < deadline, "the standby did not catch up"
        time.sleep(0.02)

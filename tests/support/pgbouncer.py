"""A real PgBouncer in transaction mode in front of a test server, with two server connections per database."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pgtrickle.embedded.account import hand_over, server_account
from pgtrickle.embedded.server import HOST, EmbeddedServer

POOL_SIZE = 2


@dataclass(frozen=True)
class Pooler:
    """A running PgBouncer."""

    port: int
    log_path: Path

    def dsn(self, dbname: str, user: str = "postgres") -> str:
        return f"postgresql://{user}@{HOST}:{self.port}/{dbname}"

    def admin(self, command: str) -> list[tuple[object, ...]]:
        """The result of a command on the admin console, such as SHOW POOLS."""
        # The console supports the simple protocol only.
        with psycopg.connect(self.dsn("pgbouncer"), autocommit=True, prepare_threshold=None) as conn:
            cursor = psycopg.ClientCursor(conn)
            cursor.execute(command.encode())
            return cursor.fetchall() if cursor.description else []


def pgbouncer_program() -> str | None:
    """The path of PgBouncer, or None if it is not installed."""
    return shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


@contextmanager
def pooler_before(server: EmbeddedServer) -> Iterator[Pooler]:
    """Run PgBouncer in transaction mode for all databases and roles of a server."""
    program = pgbouncer_program()
    assert program is not None, "PgBouncer is not installed (on Debian: apt-get install pgbouncer)"
    account = server_account()
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-pooler-"))
    port = _free_port()
    (base / "users.txt").write_text('"postgres" ""\n')
    (base / "pgbouncer.ini").write_text(
        f"""[databases]
* = host={HOST} port={server.port} auth_user=postgres
[pgbouncer]
listen_addr = {HOST}
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {base}/users.txt
auth_query = SELECT rolname, '' FROM pg_roles WHERE rolname = $1
admin_users = postgres
pool_mode = transaction
default_pool_size = {POOL_SIZE}
max_client_conn = 300
ignore_startup_parameters = extra_float_digits
logfile = {base}/log
pidfile = {base}/pid
"""
    )
    for path in (base, *base.iterdir()):
        hand_over(path, account)
    process = subprocess.Popen(
        [program, "-q", base / "pgbouncer.ini"],
        user=None if account is None else account.uid,
        group=None if account is None else account.gid,
        cwd=base,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pooler = Pooler(port, base / "log")
    try:
        _await(pooler, process)
        yield pooler
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(base)


def _await(pooler: Pooler, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not _answers(pooler):
        assert process.poll() is None, f"PgBouncer ended: {pooler.log_path.read_text()}"
        assert time.monotonic() < deadline, f"PgBouncer does not answer: {pooler.log_path.read_text()}"
        time.sleep(0.05)


def _answers(pooler: Pooler) -> bool:
    try:
        psycopg.connect(pooler.dsn("postgres")).close()
    except psycopg.OperationalError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])

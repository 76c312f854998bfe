"""The embedded server starts, restarts, crashes and recovers; fixtures provide ordinary roles and fresh databases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgtrickle.embedded.binaries import ServerVersion
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import EmbeddedServerError
from tests.support.database import TestDatabase, fresh_database

pytestmark = pytest.mark.pgversions

QUICK = {"fsync": "off"}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory, pg_version: ServerVersion) -> Iterator[EmbeddedServer]:
    """A server that these tests may restart and kill, below a directory that only its owner could enter before."""
    closed = tmp_path_factory.mktemp("closed")
    closed.chmod(0o700)
    with EmbeddedServer(closed / "data", version=pg_version, settings={**QUICK, "work_mem": "5MB"}) as running:
        yield running


def fetch_value(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(query).fetchone()
        assert row is not None
        value: object = row[0]
        return value


def test_the_server_has_the_requested_version(server: EmbeddedServer, pg_version: ServerVersion) -> None:
    assert int(str(fetch_value(server.dsn(), "SHOW server_version_num"))) // 10000 == pg_version == server.version


def test_settings_reach_the_server(own_server: EmbeddedServer) -> None:
    assert fetch_value(own_server.dsn(), "SHOW work_mem") == "5MB"


def test_socket_and_tcp_reach_the_same_server(own_server: EmbeddedServer) -> None:
    over_socket = f"host={own_server.socket_dir} port={own_server.port} user=postgres dbname=postgres"
    query = "SELECT pg_postmaster_start_time()"
    assert fetch_value(over_socket, query) == fetch_value(own_server.dsn(), query)


def test_restart_keeps_port_and_data(own_server: EmbeddedServer) -> None:
    dsn = own_server.dsn()
    with psycopg.connect(dsn) as conn:
        conn.execute("CREATE TABLE kept_by_restart AS SELECT 1 AS x")
    started = fetch_value(dsn, "SELECT pg_postmaster_start_time()")
    own_server.restart()
    assert own_server.dsn() == dsn
    assert fetch_value(dsn, "SELECT x FROM kept_by_restart") == 1
    assert fetch_value(dsn, "SELECT pg_postmaster_start_time()") != started


def test_kill_ends_every_process_and_the_next_start_recovers(own_server: EmbeddedServer) -> None:
    with psycopg.connect(own_server.dsn()) as conn:
        conn.execute("CREATE TABLE kept_by_kill AS SELECT 1 AS x")
    victim = psycopg.connect(own_server.dsn())
    backend = psutil.Process(victim.info.backend_pid)
    own_server.kill()
    assert not own_server.is_running
    assert not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE
    with pytest.raises(psycopg.OperationalError):
        victim.execute("SELECT 1")
    victim.close()
    own_server.start()
    assert fetch_value(own_server.dsn(), "SELECT x FROM kept_by_kill") == 1
    assert "automatic recovery in progress" in own_server.log_path.read_text()


def test_exit_of_the_program_stops_the_server(tmp_path: Path, pg_version: ServerVersion) -> None:
    program = (
        "import sys; from pathlib import Path; from pgtrickle.embedded.server import EmbeddedServer\n"
        "server = EmbeddedServer(Path(sys.argv[1]), version=int(sys.argv[2]), settings={'fsync': 'off'})\n"
        "server.start(); print(server._process.pid); sys.exit(3)"
    )
    data_dir = tmp_path / "data"
    ended = subprocess.run([sys.executable, "-c", program, data_dir, str(pg_version)], capture_output=True, text=True)
    assert ended.returncode == 3, ended.stderr
    assert not psutil.pid_exists(int(ended.stdout))
    assert not (data_dir / "postmaster.pid").exists()


def test_directory_too_long_for_a_socket_gets_another_one(tmp_path: Path, pg_version: ServerVersion) -> None:
    data_dir = tmp_path / ("long" * 20) / "it's data"
    with EmbeddedServer(data_dir, version=pg_version, settings=QUICK) as running:
        socket_dir = running.socket_dir
        assert socket_dir != data_dir
        over_socket = make_conninfo(host=str(socket_dir), port=running.port, user="postgres", dbname="postgres")
        assert fetch_value(over_socket, "SHOW data_directory") == str(data_dir)
    assert not socket_dir.exists()


def test_a_failed_start_reports_the_reason(tmp_path: Path, pg_version: ServerVersion) -> None:
    broken = EmbeddedServer(tmp_path / "data", version=pg_version, settings={**QUICK, "no_such_setting": "1"})
    with pytest.raises(EmbeddedServerError, match="no_such_setting"):
        broken.start()
    assert not broken.is_running


def test_used_port_is_refused(tmp_path: Path, pg_version: ServerVersion, server: EmbeddedServer) -> None:
    second = EmbeddedServer(tmp_path / "data", version=pg_version, settings=QUICK, port=server.port)
    with pytest.raises(EmbeddedServerError, match="Address already in use"):
        second.start()


def test_directory_of_another_version_is_refused(server: EmbeddedServer, pg_version: ServerVersion) -> None:
    other: ServerVersion = 18 if pg_version == 16 else 16
    with pytest.raises(EmbeddedServerError, match=f"belongs to PostgreSQL {pg_version}, not {other}"):
        EmbeddedServer(server.data_dir, version=other).start()


def test_foreign_directory_is_refused(tmp_path: Path, pg_version: ServerVersion) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(EmbeddedServerError, match="not empty"):
        EmbeddedServer(tmp_path, version=pg_version).start()


def test_database_belongs_to_an_ordinary_role(database: TestDatabase, conn: psycopg.Connection) -> None:
    row = conn.execute(
        "SELECT current_user, rolsuper, rolcreaterole, pg_get_userbyid(datdba)"
        " FROM pg_roles, pg_database WHERE rolname = current_user AND datname = current_database()"
    ).fetchone()
    assert row == ("app", False, False, "app")
    conn.execute("CREATE TABLE t (x int)")
    assert conn.info.dbname == database.name


def test_database_and_roles_are_gone_afterwards(server: EmbeddedServer) -> None:
    with fresh_database(server) as database:
        owner = database.create_role("owner")
        other = database.create_role("other")
        with psycopg.connect(database.direct_dsn) as conn:
            conn.execute(f"GRANT CREATE ON SCHEMA public TO {owner}")
        with psycopg.connect(database.direct_dsn_as(owner)) as conn:
            conn.execute("CREATE TABLE t (x int)")
            conn.execute(f"GRANT SELECT ON t TO {other}")
        forgotten = psycopg.connect(database.direct_dsn)
        forgotten.execute("SELECT 1")
        prepared = psycopg.connect(database.direct_dsn_as(owner))
        prepared.execute("INSERT INTO t VALUES (1)")
        prepared.execute("PREPARE TRANSACTION 'forgotten'")
        prepared.close()
    forgotten.close()
    gone = "SELECT count(*) FROM pg_roles r FULL JOIN pg_database d ON false WHERE rolname = '{}' OR datname = '{}'"
    assert fetch_value(server.dsn(), gone.format(owner, database.name)) == 0

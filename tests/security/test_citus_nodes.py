"""On the nodes of a Citus cluster, only administrators decide what is read, and only one login is the service role."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import PgtrickleError
from tests.security.shadows import shadows
from tests.support.citus import Cluster, cluster, servers
from tests.support.citus_shop import needs_citus
from tests.support.database import APP_ROLE

pytestmark = needs_citus


@dataclass(frozen=True)
class ClusterRoles:
    """A coordinator with one worker, where alice and mallory own a distributed table `d` each."""

    cluster: Cluster
    alice: str
    mallory: str

    @contextmanager
    def connect(self, role: str, node: int = 0) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.cluster.servers[node].dsn(self.cluster.name, role), autocommit=True) as conn:
            yield conn

    def sql(self, role: str, *statements: str) -> None:
        with self.connect(role) as conn:
            for statement in statements:
                conn.execute(statement.encode())

    def rows(self, role: str, query: str) -> set[tuple[Any, ...]]:
        with self.connect(role) as conn:
            return set(conn.execute(query.encode()).fetchall())

    def service(self) -> pgtrickle.Database:
        return pgtrickle.connect(self.cluster.dsn())

    def create_role(self, name: str) -> str:
        role = f"{name}_{self.cluster.name}"
        with psycopg.connect(self.cluster.superuser_dsn(), autocommit=True) as conn:
            conn.execute(f"CREATE ROLE {role} LOGIN".encode())
        return role


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[EmbeddedServer]]:
    with servers(2) as made:
        yield made


@pytest.fixture
def on_cluster(nodes: list[EmbeddedServer]) -> Iterator[ClusterRoles]:
    with cluster(nodes, workers=1) as made:
        found = ClusterRoles(made, f"alice_{made.name}", f"mallory_{made.name}")
        for name in ("alice", "mallory"):
            owner = found.create_role(name)
            with psycopg.connect(made.superuser_dsn(), autocommit=True) as conn:
                conn.execute(f"CREATE SCHEMA {owner} AUTHORIZATION {owner}".encode())
                conn.execute(f"GRANT USAGE ON SCHEMA {owner} TO PUBLIC".encode())
        with found.service() as db:
            db.install()
        for owner in (found.alice, found.mallory):
            found.sql(
                owner,
                f"CREATE TABLE {owner}.d (id int PRIMARY KEY, note text)",
                f"SELECT create_distributed_table('{owner}.d', 'id')",
                f"GRANT SELECT, TRIGGER ON {owner}.d TO {APP_ROLE}",
                f"INSERT INTO {owner}.d SELECT i, '{owner} ' || i FROM generate_series(1, 6) AS i",
            )
        yield found


def create_in_sql(owner: str) -> str:
    return (
        f"SELECT pgtrickle.create_stream_table('{owner}.st', 'SELECT id, note FROM {owner}.d', initialize => false,"
        " st_placement => 'local', key_columns => '{id}')"
    )


def tell(conn: psycopg.Connection[Any], database: str, definition: dict[str, Any]) -> None:
    """Describe a table of a node."""
    conn.execute(
        "SELECT pgtrickle._gate('import_table', %s)", (Jsonb({"database": database, "definition": definition}),)
    )


def test_an_owner_cannot_decide_whose_changes_are_read_on_a_node(on_cluster: ClusterRoles) -> None:
    alice, mallory = on_cluster.alice, on_cluster.mallory
    for owner in (alice, mallory):
        on_cluster.sql(owner, create_in_sql(owner))
    names = [f"{alice}.st", f"{mallory}.st"]
    with on_cluster.service() as db:
        db.refresh(names)
    with on_cluster.connect(mallory) as conn:
        known = {
            row[0]: row
            for row in conn.execute(
                "SELECT source_schema, database, source_relid, node, columns, shape, source_stable_name"
                " FROM pgtrickle.pgt_foreign_tables"
            )
        }
        _, node, mine, system, columns, my_shape, my_buffer = known[mallory]
        _, _, hers, _, _, her_shape, her_buffer = known[alice]
        table = {"schema": mallory, "name": "d", "node": system, "columns": columns, "key": ["id"]}
        for shape in ("another", my_shape):  # her changes for mallory's stream table
            with suppress(psycopg.errors.InsufficientPrivilege):
                tell(conn, node, table | {"relid": mine, "stable_name": her_buffer, "shape": shape})
        for shape in ("another", her_shape):  # mallory's changes for hers
            with suppress(psycopg.errors.InsufficientPrivilege):
                tell(conn, node, table | {"relid": hers, "stable_name": my_buffer, "shape": shape})
    on_cluster.sql(alice, f"INSERT INTO {alice}.d SELECT i, 'secret' FROM generate_series(100, 110) AS i")
    on_cluster.sql(mallory, f"INSERT INTO {mallory}.d SELECT i, 'own' FROM generate_series(200, 210) AS i")
    with on_cluster.service() as db:
        db.refresh(names)
    for owner in (alice, mallory):
        rows = on_cluster.rows(owner, f"SELECT id, note FROM {owner}.st")
        assert rows == on_cluster.rows(owner, f"SELECT id, note FROM {owner}.d")


def test_an_owner_creates_a_stream_table_on_a_distributed_table(on_cluster: ClusterRoles) -> None:
    """With the Python API, twice: the table is imported the first time."""
    mallory = on_cluster.mallory
    for name in ("first", "second"):
        with pgtrickle.connect(on_cluster.cluster.servers[0].dsn(on_cluster.cluster.name, mallory)) as db:
            db.create_stream_table(
                f"{mallory}.{name}", f"SELECT id, note FROM {mallory}.d", st_placement="local", initialize=False
            )
        for id_ in (1000, 1001):
            on_cluster.sql(
                mallory, f"INSERT INTO {mallory}.d SELECT coalesce(max(id), 0) + {id_}, 'x' FROM {mallory}.d"
            )
            with on_cluster.service() as db:
                db.refresh(f"{mallory}.{name}")
            rows = on_cluster.rows(mallory, f"SELECT id, note FROM {mallory}.{name}")
            assert rows == on_cluster.rows(mallory, f"SELECT id, note FROM {mallory}.d")


def test_a_former_login_of_the_service_has_no_rights_on_workers(on_cluster: ClusterRoles) -> None:
    alice = on_cluster.alice
    former, new = on_cluster.create_role("former"), on_cluster.create_role("new")
    with on_cluster.service() as db:
        db.install(service_role=former)
        db.create_stream_table("public.st", f"SELECT id, note FROM {alice}.d", st_placement="local", initialize=False)
        db.install(service_role=new)
    on_cluster.sql(alice, f"INSERT INTO {alice}.d SELECT i, 'secret' FROM generate_series(100, 120) AS i")
    for node in (0, 1):
        with psycopg.connect(on_cluster.cluster.superuser_dsn(node), autocommit=True) as conn:
            assert conn.execute("SELECT pgtrickle._service_role()").fetchone() == (new,)
            row = conn.execute("SELECT buffer_relid::text FROM pgtrickle.pgt_change_tracking").fetchone()
            assert row is not None
        for attack in (
            f"SELECT * FROM {row[0]}",
            f"DELETE FROM {row[0]}",
            "SELECT pgtrickle.set('enabled', 'off')",
            "DELETE FROM pgtrickle.pgt_consumers",
        ):
            with on_cluster.connect(former, node) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(attack.encode())


def test_a_catalog_planted_on_a_worker_is_not_used(nodes: list[EmbeddedServer]) -> None:
    """Reading its version must not run what an untrusted role has put in its place."""
    with cluster(nodes, workers=1) as made:
        planter = f"planter_{made.name}"
        with psycopg.connect(made.superuser_dsn(), autocommit=True) as conn:
            conn.execute(f"CREATE ROLE {planter} LOGIN".encode())
        local = "SET citus.enable_ddl_propagation = off"
        with psycopg.connect(made.superuser_dsn(1), autocommit=True) as conn:
            conn.execute(f"{local}; GRANT CREATE ON DATABASE {made.name} TO {planter}".encode())
        with psycopg.connect(made.servers[1].dsn(made.name, planter), autocommit=True) as conn:
            conn.execute(local.encode())
            conn.execute(
                """
                CREATE SCHEMA pgtrickle;
                GRANT USAGE ON SCHEMA pgtrickle TO PUBLIC;
                CREATE FUNCTION pgtrickle.planted() RETURNS int LANGUAGE plpgsql AS $$
                BEGIN
                    RAISE LOG 'planted code ran';
                    RETURN 1;
                END $$;
                CREATE VIEW pgtrickle.pgt_schema_version AS SELECT pgtrickle.planted() AS version;
                GRANT SELECT ON pgtrickle.pgt_schema_version TO PUBLIC;
                """
            )
        with pgtrickle.connect(made.dsn()) as db, pytest.raises(PgtrickleError, match=planter):
            db.install()
        assert "planted code ran" not in made.servers[1].log_path.read_text(errors="replace")


def test_nobody_has_tables_of_others_captured_on_nodes(on_cluster: ClusterRoles) -> None:
    """These are the actions of the gate that only a cluster has; the others are in test_gate.py."""
    alice, mallory = on_cluster.alice, on_cluster.mallory
    on_cluster.sql(alice, create_in_sql(alice))
    (stable,) = on_cluster.rows(alice, f"SELECT pgtrickle.stable_hash('{alice}.d')")
    columns = [{"attnum": 1, "name": "id"}, {"attnum": 2, "name": "note"}]
    arguments = {"definition": {"stable_name": stable[0], "columns": columns}}
    for node, action in ((0, "track_shards"), (1, "track_shards"), (0, "read_from_nodes")):
        gate = (
            f"SELECT pgtrickle._gate('{action}', %s::jsonb || jsonb_build_object('source', '{alice}.d'::regclass::oid))"
        )
        with on_cluster.connect(mallory, node) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(gate.encode(), (Jsonb(arguments),))


def test_definer_functions_on_nodes_have_a_search_path(on_cluster: ClusterRoles) -> None:
    alice = on_cluster.alice
    on_cluster.sql(
        alice,
        create_in_sql(alice),
        f"CREATE TABLE {alice}.local (id int PRIMARY KEY)",
        f"SELECT pgtrickle.create_stream_table('{alice}.of_local', 'SELECT id FROM {alice}.local', initialize => false)",
    )
    for node in (0, 1):
        with psycopg.connect(on_cluster.cluster.superuser_dsn(node), autocommit=True) as conn:
            found = conn.execute(
                "SELECT oid::regprocedure::text, coalesce(proconfig::text, '') FROM pg_proc WHERE prosecdef"
                " AND pronamespace IN ('pgtrickle'::regnamespace, 'pgtrickle_changes'::regnamespace,"
                " 'pgtrickle_views'::regnamespace)"
            ).fetchall()
        assert len(found) > 50
        assert any(name.startswith("pgtrickle_changes.capture_") for name, _ in found)
        assert [name for name, config in found if '"search_path=pg_catalog, pg_temp"' not in config] == []


@pytest.mark.parametrize("way", ["temporary", "search path"])
@pytest.mark.parametrize("placement", ["distributed", "plain"])
def test_capture_on_shards_takes_no_names_of_a_writer(on_cluster: ClusterRoles, placement: str, way: str) -> None:
    """Capture runs as the installing role, with a search path of its own and qualified names."""
    mallory = on_cluster.mallory
    own = f"{mallory}.own"
    on_cluster.sql(
        mallory,
        f"CREATE FUNCTION {mallory}.evil() RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog AS"
        " $$ BEGIN RAISE LOG 'evil ran as %', current_user; RETURN true; END $$",
        f"CREATE TABLE {own} (id int PRIMARY KEY, note text)",
        f"SELECT create_distributed_table('{own}', 'id')" if placement == "distributed" else "SELECT",
        f"GRANT SELECT, TRIGGER ON {own} TO {APP_ROLE}",
    )
    with on_cluster.service() as db:
        db.create_stream_table("public.st", f"SELECT id, note FROM {own}", st_placement="local")
    nodes = (0, 1) if placement == "distributed" else (0,)  # connected to a worker, she writes to its shards herself
    for node in nodes:
        with on_cluster.connect(mallory, node) as conn:
            conn.execute("SET citus.enable_ddl_propagation = off")
            for statement in shadows(way, mallory):
                conn.execute(statement.encode())
            conn.execute(f"INSERT INTO {own} SELECT {node * 100} + i, 'x' FROM generate_series(1, 20) AS i".encode())
            conn.execute(f"UPDATE {own} SET note = 'y' WHERE id > {node * 100 + 10}".encode())
            conn.execute(f"DELETE FROM {own} WHERE id > {node * 100 + 15}".encode())
    assert evil_ran_as(on_cluster) <= {mallory}
    with on_cluster.service() as db:
        db.refresh("public.st")
    rows = on_cluster.rows(APP_ROLE, "SELECT id, note FROM public.st")
    assert len(rows) == 15 * len(nodes)
    assert rows == on_cluster.rows(mallory, f"SELECT id, note FROM {own}")


def evil_ran_as(on_cluster: ClusterRoles) -> set[str]:
    """The roles under which mallory.evil() ran, on any node."""
    entry = rf"\] {on_cluster.cluster.name}\|[^|\n]*\| LOG:  evil ran as (.*)$"
    logs = (server.log_path.read_text(errors="replace") for server in on_cluster.cluster.servers)
    return {role for log in logs for role in re.findall(entry, log, re.MULTILINE)}

"""Citus: the nodes of a cluster as members of one database set, and cuts of all nodes at one point in time.

A distributed table is read as one table in many databases: on each node, its rows are those of the shards there, and
its changes are those in the node's buffer. A cut never shows half of a transaction that spans nodes: see Barrier.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from pgtrickle.catalog.gate import is_administrator, pass_gate
from pgtrickle.catalog.install import install, installed_version, latest_version, uninstall
from pgtrickle.errors import NotDifferentiableError, PgtrickleError, PrivilegeError, SourceLockedError
from pgtrickle.postgres import fence
from pgtrickle.sites.remote.connections import Connections, dsn_from, errors_naming

if TYPE_CHECKING:
    from pgtrickle.sites.remote.databases import RemoteDatabases

COORDINATOR = "@coordinator"
BARRIER_LOCK_TIMEOUT = "300ms"
ATTEMPTS = 10
# Prepared transactions on a node: they are being committed just now, or were left by a crash.
PREPARED = (
    "SELECT coalesce(string_agg(gid, ' '), '') FROM pg_prepared_xacts"
    " WHERE database = current_database() AND gid LIKE 'citus\\_%'"
)


@dataclass
class Barrier:
    """Keeps transactions that span nodes from committing while all nodes are cut: each is seen on all nodes or on none.

    A transaction that commits on several nodes takes a lock on pg_dist_transaction before the first PREPARE, and keeps
    it until all nodes have committed. The barrier takes a conflicting lock. A session that waits for it makes all later
    ones wait too, so the lock timeouts are short.
    """

    connections: Connections
    _held: list[psycopg.Connection[Any]] = field(default_factory=list)

    @contextmanager
    def raised(self, home: psycopg.Connection[Any], nodes: Mapping[str, str]) -> Iterator[None]:
        """Raise the barrier on the coordinator and the nodes (DSNs by name) until `lift()` or the end of the block."""
        with ExitStack() as stack:
            everywhere = {COORDINATOR: dsn_from(home, COORDINATOR, "")} | dict(nodes)
            conns = {name: stack.enter_context(self.connections.open(name, dsn)) for name, dsn in everywhere.items()}
            self._raise(conns)
            try:
                yield
            finally:
                self.lift()

    @property
    def is_up(self) -> bool:
        return bool(self._held)

    def lift(self) -> None:
        held, self._held = self._held, []
        for conn in held:
            with suppress(psycopg.OperationalError):  # lost, and its lock with it
                conn.execute("ROLLBACK")

    def _raise(self, conns: Mapping[str, psycopg.Connection[Any]]) -> None:
        for attempt in range(ATTEMPTS):
            try:
                if self._try(conns):
                    return
            except psycopg.errors.LockNotAvailable:
                pass
            self.lift()
            # Randomized, because other processes may try to raise the barrier too.
            time.sleep(random.uniform(0.5, 1.0) * 0.05 * 2 ** min(attempt, 5))
        raise SourceLockedError(
            "transactions of several nodes did not end, or wait in pg_prepared_xacts to be recovered",
            "A service tries again by itself; Citus recovers what a crash left every citus.recover_2pc_interval.",
        )

    def _try(self, conns: Mapping[str, psycopg.Connection[Any]]) -> bool:
        """Lock all nodes, in an order that is always the same; False if a crash left a transaction half committed."""
        for name, conn in conns.items():
            with errors_naming(name):
                conn.execute("BEGIN")
                self._held.append(conn)
                conn.execute(f"SET LOCAL lock_timeout = '{BARRIER_LOCK_TIMEOUT}'")
                try:
                    conn.execute("LOCK TABLE pg_catalog.pg_dist_transaction IN EXCLUSIVE MODE")
                except psycopg.errors.InsufficientPrivilege as error:
                    raise PrivilegeError(
                        f"role {conn.info.user} may not keep transactions from ending on {name} while all nodes are cut",
                        f"As superuser, there: GRANT UPDATE ON pg_catalog.pg_dist_transaction TO {conn.info.user};",
                    ) from error
        return all(conn.execute(PREPARED).fetchone() == ("",) for conn in conns.values())


@dataclass
class Cluster:
    """The Citus cluster of which the home database is the coordinator, if it is one."""

    remote: RemoteDatabases

    @property
    def home(self) -> psycopg.Connection[Any]:
        return self.remote.home

    def distributed(self, view: int, refresh_mode: str) -> list[int]:
        """The distributed tables of a view that have to be read from their nodes."""
        rows = self.home.execute(
            "SELECT relation::oid::bigint FROM pgtrickle._sources(%s::oid::regclass)"
            " WHERE pgtrickle._is_distributed(relation)"
            " AND NOT pgtrickle._is_read_through_coordinator(%s::oid::regclass, %s)",
            (view, view, refresh_mode),
        ).fetchall()
        return [row[0] for row in rows]

    def spread(self, tables: Sequence[int]) -> None:
        """Set up capture of distributed tables on every node, and read the tables from there from now on."""
        if not tables:
            return
        nodes = self._register_nodes()
        administers = is_administrator(self.home)
        for table in tables:
            row = self.home.execute(
                "SELECT format('%%I.%%I', n.nspname, c.relname), pgtrickle._node_capture_problem(c.oid)"
                " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s",
                (table,),
            ).fetchone()
            assert row is not None
            label, problem = row
            if problem is not None:
                raise NotDifferentiableError(
                    f"changes of the distributed table {label} cannot be captured: {problem[0]}", problem[1]
                )
            self._fit(table)
            # Only administrators decide which buffers are read on a node. For others, the service does this before
            # it reads.
            for name in nodes.values() if administers else ():
                self.remote.import_table(name, label)
            pass_gate(self.home, "read_from_nodes", source=table)
        if administers:
            self.home.execute("SELECT pgtrickle._forget_nodes()")

    def follow(self, ids: Sequence[int]) -> dict[int, list[int]]:
        """Bind stream tables again whose sources have changed placement; return their sources that Citus manages."""
        found: dict[int, list[int]] = {}
        rows = self.home.execute(
            "SELECT id, relation::oid::bigint, pgtrickle._is_distributed(relation)"
            " FROM pgtrickle._follow_placements(%s::bigint[])",
            (list(ids),),
        ).fetchall()
        for pgt_id, table, distributed in rows:
            found.setdefault(pgt_id, []).append(table)
            if distributed:
                self.spread([table])
        return found

    def behind(self, pgt_id: int) -> list[int]:
        """The distributed tables that a stream table reads."""
        rows = self.home.execute(
            "SELECT DISTINCT d.through::oid::bigint FROM pgtrickle.pgt_dependencies d"
            " WHERE d.pgt_id = %s AND pgtrickle._is_read_from_nodes(d.through)",
            (pgt_id,),
        ).fetchall()
        return [row[0] for row in rows]

    def finish(self, pgt_id: int) -> None:
        """Create the triggers on shards that Citus does not create, after it has created the others."""
        for table in self.behind(pgt_id):
            self._fit(table)

    def update_nodes(self) -> bool:
        """Set up capture on added nodes, and forget removed ones; return whether there were any."""
        rows = self.home.execute(
            "SELECT relid::oid::bigint FROM pgtrickle._outdated_distributed_tables() AS relid"
        ).fetchall()
        self.spread([relid for (relid,) in rows])
        if not rows:
            self.home.execute("SELECT pgtrickle._record_placements()")
        return bool(rows)

    def tidy(self) -> None:
        """Remove capture that no stream table needs from the nodes that can be reached."""
        if not is_administrator(self.home):
            return  # the service does it
        rows = self.home.execute("SELECT name FROM pgtrickle._unused_nodes() AS name").fetchall()
        for (name,) in rows:
            with suppress(psycopg.Error, PgtrickleError):
                self.remote.ask(name, "SELECT pgtrickle._untrack_unused()", ())

    def install(self) -> None:
        """Install a catalog on every node, because each node captures its own changes."""
        row = self.home.execute("SELECT pgtrickle._has_citus() AND pgtrickle._citus_group() = 0").fetchone()
        if row != (True,):
            return
        self._register_nodes()
        tables = "SELECT relid::oid::bigint FROM pgtrickle.pgt_sharded_tables WHERE database_set = '@cluster'"
        for (table,) in self.home.execute(tables).fetchall():
            self._fit(table)

    def uninstall(self) -> None:
        """Remove the catalogs of all nodes of the cluster. If some node cannot be reached, none is removed."""
        rows = self.home.execute(
            "SELECT k.name, k.dsn FROM pgtrickle.pgt_usable_databases k"
            " JOIN pgtrickle._citus_nodes() n ON pgtrickle._node_name(n.groupid) = k.name"
        ).fetchall()
        with ExitStack() as stack:
            conns = {
                name: stack.enter_context(self.remote.connections.open(name, dsn_from(self.home, name, dsn)))
                for name, dsn in rows
            }
            for name, conn in conns.items():
                with errors_naming(name):
                    if installed_version(conn) is not None:
                        uninstall(conn)

    def _register_nodes(self) -> dict[int, str]:
        """Register the nodes, and install a catalog on each; return their names by group."""
        rows = self.home.execute(
            "SELECT n.groupid, pgtrickle._node_name(n.groupid), format('host=%s port=%s', n.host, n.port), d.dsn"
            " FROM pgtrickle._citus_nodes() n"
            " LEFT JOIN pgtrickle.pgt_usable_databases d ON d.name = pgtrickle._node_name(n.groupid)"
            " WHERE n.groupid <> 0"
        ).fetchall()
        role = self.home.execute("SELECT pgtrickle._service_role()").fetchone()
        assert role is not None
        if not is_administrator(self.home):
            return {group: name for group, name, _, _ in rows}  # the service registers them
        for group, name, dsn, known in rows:
            with self.remote.connections.open(name, dsn_from(self.home, name, dsn)) as conn, errors_naming(name):
                if not _is_served_by(conn, role[0]):
                    install(conn, service_role=role[0])
                elif known == dsn:
                    continue
                node = conn.execute("SELECT pgtrickle._database_identity()").fetchone()
            assert node is not None
            self.home.execute("SELECT pgtrickle._register_node(%s, %s, %s)", (group, dsn, node[0]))
        return {group: name for group, name, _, _ in rows}

    def _fit(self, table: int) -> None:
        """Set up capture of a table on the nodes, as the current role or as the owner of a stream table on it."""
        row = self.home.execute(
            "SELECT has_table_privilege(%s::oid, 'TRIGGER'), (SELECT min(d.pgt_id) FROM pgtrickle.pgt_dependencies d"
            " WHERE %s::oid IN (d.source_relid, d.through))",
            (table, table),
        ).fetchone()
        assert row is not None
        may, reader = row
        statement = f"SELECT pgtrickle._align_node_capture({table:d}::oid::regclass)"
        if may or reader is None:
            self.home.execute(statement.encode())
        else:
            with self.home.transaction():
                fence.write_as_owner(self.home, reader, statement, None, {})
                fence.leave(self.home, {})


def _is_served_by(conn: psycopg.Connection[Any], role: str) -> bool:
    """Whether a node has this release's catalog, with `role` as its service role."""
    if installed_version(conn) != latest_version():
        return False
    return conn.execute("SELECT pgtrickle._service_role()").fetchone() == (role,)

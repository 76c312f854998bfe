"""Citus: the nodes of a cluster as databases of one set, and cuts of all of them at one moment.

A distributed table is read as one table in many databases: its rows on each node are those of the shards there, and its
changes those in the node's own buffer. No transaction of several nodes is ever cut in half: see Barrier.
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
# What waits on a node to be committed, by somebody at work or because a crash left it.
PREPARED = (
    "SELECT coalesce(string_agg(gid, ' '), '') FROM pg_prepared_xacts"
    " WHERE database = current_database() AND gid LIKE 'citus\\_%'"
)


@dataclass
class Barrier:
    """Keeps transactions of several nodes from ending while all nodes are cut: each is seen on all of them, or on none.

    Who commits on several nodes takes a lock on pg_dist_transaction before the first PREPARE, and keeps it until all have
    committed. Who waits for it holds up all who come after: so nobody waits long.
    """

    connections: Connections
    _held: list[psycopg.Connection[Any]] = field(default_factory=list)

    @contextmanager
    def raised(self, home: psycopg.Connection[Any], nodes: Mapping[str, str]) -> Iterator[None]:
        """Over the coordinator and these nodes, by their DSNs, until it is lifted, at the end of the block at the latest."""
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
            time.sleep(random.uniform(0.5, 1.0) * 0.05 * 2 ** min(attempt, 5))  # others want it too
        raise SourceLockedError(
            "transactions of several nodes did not end, or wait in pg_prepared_xacts to be recovered",
            "A service tries again by itself; Citus recovers what a crash left every citus.recover_2pc_interval.",
        )

    def _try(self, conns: Mapping[str, psycopg.Connection[Any]]) -> bool:
        """In the same order for all who do this; False where a crash left a transaction half committed."""
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
    """The cluster that a database coordinates, if there is one."""

    remote: RemoteDatabases

    @property
    def home(self) -> psycopg.Connection[Any]:
        return self.remote.home

    def distributed(self, view: int, refresh_mode: str) -> list[int]:
        """The distributed tables that a view reads, and that are to be read from their nodes."""
        rows = self.home.execute(
            "SELECT relation::oid::bigint FROM pgtrickle._sources(%s::oid::regclass)"
            " WHERE pgtrickle._is_distributed(relation)"
            " AND NOT pgtrickle._is_read_through_coordinator(%s::oid::regclass, %s)",
            (view, view, refresh_mode),
        ).fetchall()
        return [row[0] for row in rows]

    def spread(self, tables: Sequence[int]) -> None:
        """Let every node capture the changes of distributed tables, and read them from there."""
        if not tables:
            return
        nodes = self._register_nodes()
        administers = is_administrator(self.home)
        for table in tables:
            row = self.home.execute(
                "SELECT format('%%I.%%I', n.nspname, c.relname), pgtrickle._not_spreadable(c.oid)"
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
            # Whose buffer is read on a node is for administrators to say. For others the service does it before it reads.
            for name in nodes.values() if administers else ():
                self.remote.import_table(name, label)
            pass_gate(self.home, "spread", source=table)
        if administers:
            self.home.execute("SELECT pgtrickle._forget_nodes()")

    def follow(self, ids: Sequence[int]) -> dict[int, list[int]]:
        """Bind stream tables anew whose tables were distributed, or no longer are; gives the tables that Citus has of these."""
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
            " WHERE d.pgt_id = %s AND pgtrickle._is_spread(d.through)",
            (pgt_id,),
        ).fetchall()
        return [row[0] for row in rows]

    def finish(self, pgt_id: int) -> None:
        """Once the triggers are there: those that Citus does not send to shards."""
        for table in self.behind(pgt_id):
            self._fit(table)

    def update_nodes(self) -> bool:
        """Have nodes that came since capture what they will get, and forget those that left; whether there were any."""
        rows = self.home.execute("SELECT relid::oid::bigint FROM pgtrickle._unsettled_tables() AS relid").fetchall()
        self.spread([relid for (relid,) in rows])
        if not rows:
            self.home.execute("SELECT pgtrickle._note_placements()")
        return bool(rows)

    def tidy(self) -> None:
        """What was prepared for a stream table that there is not, on nodes that can be reached."""
        if not is_administrator(self.home):
            return  # the service does it
        rows = self.home.execute("SELECT name FROM pgtrickle._unused_nodes() AS name").fetchall()
        for (name,) in rows:
            with suppress(psycopg.Error, PgtrickleError):
                self.remote.ask(name, "SELECT pgtrickle._untrack_unused()", ())

    def install(self) -> None:
        """A catalog of its own for every node: capture is theirs."""
        row = self.home.execute("SELECT pgtrickle._has_citus() AND pgtrickle._citus_group() = 0").fetchone()
        if row != (True,):
            return
        self._register_nodes()
        tables = "SELECT relid::oid::bigint FROM pgtrickle.pgt_sharded_tables WHERE database_set = '@cluster'"
        for (table,) in self.home.execute(tables).fetchall():
            self._fit(table)

    def uninstall(self) -> None:
        """Of all nodes that the cluster has, or of none."""
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
        """Make the nodes known here, with a catalog of their own; gives their names by their groups."""
        rows = self.home.execute(
            "SELECT n.groupid, pgtrickle._node_name(n.groupid), format('host=%s port=%s', n.host, n.port), d.dsn"
            " FROM pgtrickle._citus_nodes() n"
            " LEFT JOIN pgtrickle.pgt_usable_databases d ON d.name = pgtrickle._node_name(n.groupid)"
            " WHERE n.groupid <> 0"
        ).fetchall()
        role = self.home.execute("SELECT pgtrickle._service_role()").fetchone()
        assert role is not None
        if not is_administrator(self.home):
            return {group: name for group, name, _, _ in rows}  # the service makes them known
        for group, name, dsn, known in rows:
            with self.remote.connections.open(name, dsn_from(self.home, name, dsn)) as conn, errors_naming(name):
                if not _is_served_by(conn, role[0]):
                    install(conn, service_role=role[0])
                elif known == dsn:
                    continue
                node = conn.execute("SELECT pgtrickle._node()").fetchone()
            assert node is not None
            self.home.execute("SELECT pgtrickle._register_node(%s, %s, %s)", (group, dsn, node[0]))
        return {group: name for group, name, _, _ in rows}

    def _fit(self, table: int) -> None:
        """Have the nodes capture a table: with our own rights, or those of an owner of a stream table that reads it."""
        row = self.home.execute(
            "SELECT has_table_privilege(%s::oid, 'TRIGGER'), (SELECT min(d.pgt_id) FROM pgtrickle.pgt_dependencies d"
            " WHERE %s::oid IN (d.source_relid, d.through))",
            (table, table),
        ).fetchone()
        assert row is not None
        may, reader = row
        statement = f"SELECT pgtrickle._fit_nodes({table:d}::oid::regclass)"
        if may or reader is None:
            self.home.execute(statement.encode())
        else:
            with self.home.transaction():
                fence.write_as_owner(self.home, reader, statement, None, {})
                fence.leave(self.home, {})


def _is_served_by(conn: psycopg.Connection[Any], role: str) -> bool:
    """Whether a node has this release's catalog, and no other login than this one has the service's rights there."""
    if installed_version(conn) != latest_version():
        return False
    return conn.execute("SELECT pgtrickle._service_role()").fetchone() == (role,)

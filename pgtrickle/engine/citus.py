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
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb

from pgtrickle.catalog.install import install, installed_version, latest_version
from pgtrickle.engine.connection import another
from pgtrickle.engine.reach import Connections, told
from pgtrickle.errors import NotDifferentiableError, PgtrickleError, SourceLockedError

if TYPE_CHECKING:
    from pgtrickle.engine.elsewhere import Elsewhere

LOCK_TIMEOUT = "300ms"
ATTEMPTS = 10


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
            conns = {home.info.dbname: stack.enter_context(another(home))}
            conns |= {name: stack.enter_context(self.connections.open(name, dsn)) for name, dsn in nodes.items()}
            self._raise(conns)
            try:
                yield
            finally:
                self.lift()

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
            with told(name):
                conn.execute("BEGIN")
                self._held.append(conn)
                conn.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                conn.execute("LOCK TABLE pg_catalog.pg_dist_transaction IN EXCLUSIVE MODE")
        prepared = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE 'citus\\_%'"
        return all(conn.execute(prepared).fetchone() == (0,) for conn in conns.values())


@dataclass
class Cluster:
    """The cluster that a database coordinates, if there is one."""

    elsewhere: Elsewhere

    @property
    def home(self) -> psycopg.Connection[Any]:
        return self.elsewhere.home

    def distributed(self, view: int) -> list[int]:
        """The distributed tables that a view reads."""
        rows = self.home.execute(
            "SELECT relation::oid::bigint FROM pgtrickle._sources(%s::oid::regclass)"
            " WHERE pgtrickle._citus_placement(relation) = 'distributed'",
            (view,),
        ).fetchall()
        return [row[0] for row in rows]

    def spread(self, tables: Sequence[int]) -> list[str]:
        """Let every node capture the changes of distributed tables, and read them from there; gives the nodes' names."""
        if not tables:
            return []
        nodes = self._settle()
        for table in tables:
            row = self.home.execute(
                "SELECT pgtrickle._shard_capture(%s::oid::regclass),"
                " EXISTS (SELECT FROM pgtrickle._shards_here(%s::oid::regclass)),"
                " (SELECT relkind <> 'r' FROM pg_class WHERE oid = %s)",
                (table, table, table),
            ).fetchone()
            assert row is not None
            definition, here, other_kind = row
            if here or other_kind:
                raise NotDifferentiableError(
                    f"changes of the distributed table {definition['name']} cannot be captured: "
                    + ("it has shards on the coordinator" if here else "it is partitioned"),
                    "Move its shards to workers: citus_set_node_property(…, 'shouldhaveshards', false), then rebalance."
                    if here
                    else "Distribute a table that is not.",
                )
            for name in nodes.values():
                self.elsewhere.ask(name, "SELECT pgtrickle._fit_shards(%s)", (Jsonb(definition),))
                self.elsewhere.import_table(name, definition["name"])
            self.home.execute("SELECT pgtrickle._spread(%s::oid::regclass, %s)", (table, list(nodes)))
        return list(nodes.values())

    def follow(self, ids: Sequence[int]) -> dict[int, list[int]]:
        """Bind stream tables anew whose tables were distributed, or no longer are; gives the tables that Citus has of these."""
        found: dict[int, list[int]] = {}
        rows = self.home.execute(
            "SELECT id, relation::oid::bigint, pgtrickle._citus_placement(relation) = 'distributed'"
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
        rows = self.home.execute(
            "SELECT DISTINCT f.database, format('%%I.%%I', f.source_schema, f.source_name) FROM pgtrickle.pgt_dependencies d"
            " JOIN pgtrickle.pgt_foreign_tables f ON f.relid = d.source_relid"
            " WHERE d.pgt_id = %s AND pgtrickle._is_spread(d.through)",
            (pgt_id,),
        ).fetchall()
        for name, table in rows:
            self.elsewhere.ask(
                name,
                "SELECT pgtrickle._attach_truncate(source_relid, source_stable_name, false)"
                " FROM pgtrickle.pgt_change_tracking WHERE source_relid = %s::regclass",
                (table,),
            )

    def settle(self) -> bool:
        """Have nodes that came since capture what they will get, and forget those that left; whether there were any."""
        rows = self.home.execute("SELECT relid::oid::bigint FROM pgtrickle._unsettled_tables() AS relid").fetchall()
        self.spread([relid for (relid,) in rows])
        return bool(rows)

    def tidy(self) -> None:
        """What was prepared for a stream table that there is not, on nodes that can be reached."""
        rows = self.home.execute("SELECT name FROM pgtrickle._unused_nodes() AS name").fetchall()
        for (name,) in rows:
            with suppress(psycopg.Error, PgtrickleError):
                self.elsewhere.ask(name, "SELECT pgtrickle._untrack_unused()", ())

    def _settle(self) -> dict[int, str]:
        """Make the nodes known here, with a catalog of their own; gives their names by their groups."""
        rows = self.home.execute(
            "SELECT groupid, host, port, pgtrickle._node_name(groupid) FROM pgtrickle._citus_nodes() WHERE groupid <> 0"
        ).fetchall()
        role = self.home.execute("SELECT pgtrickle._service_role()").fetchone()
        assert role is not None
        for group, host, port, name in rows:
            dsn = self._dsn(host, port)
            with self.elsewhere.connections.open(name, dsn) as conn, told(name):
                if installed_version(conn) != latest_version():
                    install(conn, service_role=role[0])
                node = conn.execute("SELECT pgtrickle._node()").fetchone()
            assert node is not None
            self.home.execute("SELECT pgtrickle._register_node(%s, %s, %s)", (group, dsn, node[0]))
        return {group: name for group, _, _, name in rows}

    def _dsn(self, host: str, port: int) -> str:
        known = {name: value for name, value in conninfo_to_dict(self.home.info.dsn).items() if name != "hostaddr"}
        return make_conninfo("", **(known | {"host": host, "port": port}))

"""Remote databases that stream tables read: stand-ins, subscriptions, and the row that each refresh updates there.

Another server may forget transactions that a frontier counts as read. A crash may undo transactions that a cut has
seen, and after a restore, other transactions may get their IDs. So a refresh commits a proof there, on disk, before it
applies what it has read. If the next refresh does not find the proof, it re-initializes the stream table. The same row
keeps changes that the stream table still needs from being purged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import class_row

from pgtrickle.catalog.analysis import load_query
from pgtrickle.catalog.databases import is_node
from pgtrickle.catalog.gate import is_administrator, pass_gate
from pgtrickle.errors import DatabaseFailedError, PgtrickleError
from pgtrickle.frontier.frontier import Frontier, Reflected
from pgtrickle.sites.broker import Brokers, Interest
from pgtrickle.sites.remote.connections import Connections, Kept, check_catalog, dsn_from, errors_naming
from pgtrickle.sites.remote.cut import ForeignSource
from pgtrickle.sites.remote.foreign_servers import ForeignServers
from pgtrickle.sites.remote.functions import replaced_functions

if TYPE_CHECKING:
    from pgtrickle.refresh.work import Work


@dataclass
class NotThereError(Exception):
    """A remote database has no such table."""

    database: str
    table: str


@dataclass
class RemoteDatabases:
    """The remote databases that the stream tables of one database read."""

    home: psycopg.Connection[Any]
    connections: Connections = field(default_factory=Connections)
    brokers: Brokers | None = None  # set if changes may be taken from brokers

    @property
    def servers(self) -> ForeignServers:
        return ForeignServers(self.home, self.connections)

    @contextmanager
    def open(self, name: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection to a registered database."""
        with self.connections.open(name, self.dsns([name])[name]) as conn:
            yield conn

    def ask(self, name: str, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Run a query in a registered database, and return its rows. Connection errors name the database."""
        with self.open(name) as conn, errors_naming(name):
            return conn.execute(query.encode(), parameters).fetchall()

    def sources(self, works: Sequence[Work]) -> list[ForeignSource]:
        """The tables of remote databases that these stream tables read."""
        ids = [work.row.pgt_id for work in works if work.row.databases]
        if not ids:
            return []
        with self.home.cursor(row_factory=class_row(ForeignSource)) as cursor:
            return cursor.execute(load_query("foreign_sources"), {"ids": ids}).fetchall()

    def dsns(self, names: Collection[str]) -> dict[str, str]:
        if not names:
            return {}
        rows = self.home.execute(
            "SELECT n, pgtrickle._dsn_of(n) FROM unnest(%s::text[]) AS n", (sorted(names),)
        ).fetchall()
        return {name: dsn_from(self.home, name, dsn) for name, dsn in rows}

    def want(self, works: Sequence[Work]) -> None:
        """Register with the brokers what they did not offer, to be offered from now on."""
        wanted: dict[tuple[str, str], tuple[Work, dict[str, Interest]]] = {}
        for work in works:
            for database, lacking in work.lacking.items() if work.error is None else ():
                _, known = wanted.setdefault((database, repr(sorted(work.settings.items()))), (work, {}))
                for name, interest in lacking.items():
                    known.setdefault(name, Interest()).add(interest)
        if self.brokers is None or not wanted:
            return
        dsns = self.dsns({database for database, _ in wanted})
        node = self.home.execute("SELECT pgtrickle._node()").fetchone()
        assert node is not None
        for (database, _), (work, lacking) in wanted.items():
            label = self.home.info.dbname
            self.brokers.want(database, dsns[database], node[0], label, lacking, work.settings)

    def realign(self, works: Sequence[Work]) -> None:
        """Update the stand-ins of the works' remote tables."""
        for work in works:
            for source in work.foreign:
                try:
                    self._look_again(source)
                except (psycopg.Error, PgtrickleError) as error:
                    kept = source.shard and work.row.lost_members == "keep" and not is_node(source.database)
                    if not (kept and isinstance(error, DatabaseFailedError)):
                        self.note(error, [work])

    def _look_again(self, source: ForeignSource) -> None:
        """Update the stand-in of a remote table.

        The table is found by its OID, even if it was renamed. If the database was replaced by another one, or the table
        was created again, it is found by its name.
        """
        if source.resolved:
            self.servers.resolve(source.relid, source.database)
            return
        ((found,),) = self.ask(
            source.database,
            "SELECT pgtrickle._describe_table(pgtrickle._same_table(%s, %s, %s, %s))",
            (source.node, source.there, source.schema, source.name),
        )
        pass_gate(self.home, "stand_in", database=source.database, definition=found)

    def import_table(self, database: str, table: str) -> None:
        """Create or update the stand-in of a remote table."""
        with self.open(database) as conn, errors_naming(database):
            check_catalog(conn, database)
        try:
            ((found,),) = self.ask(database, "SELECT pgtrickle._describe_table(%s::regclass)", (table,))
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            raise NotThereError(database, table) from error
        pass_gate(self.home, "stand_in", database=database, definition=found)

    def subscribe(self, work: Work, relids: Collection[int]) -> bool:
        """Set up capture for a stream table, or make it fit tables that were altered; return whether that succeeded."""
        if not relids:
            return True
        if not is_administrator(self.home):  # for others, the service subscribes to nodes at the first refresh
            relids = {one.relid for one in self.sources([work]) if one.relid in relids and not is_node(one.database)}
        work.foreign = [source for source in self.sources([work]) if source.relid in relids]
        self.realign([work])
        for source in self.sources([work]) if work.error is None else ():
            if source.relid not in relids:
                continue
            try:
                self.ask(
                    source.database,
                    "SELECT pgtrickle._subscribe(%s, %s, %s::oid::regclass, %s::smallint[])",
                    (source.consumer, source.label, source.there, source.columns),
                )
            except (psycopg.Error, PgtrickleError) as error:
                self.note(error, [work])
        return work.error is None

    def note(self, error: Exception, works: Sequence[Work]) -> None:
        """Set an error of a remote database on the works that read it; raise it if the home connection is lost."""
        if self.home.broken or self.home.closed:
            raise error
        for work in works:
            work.error = error

    def unsubscribe_dropped(self, databases: Sequence[str]) -> None:
        """Remove the subscriptions of dropped stream tables from these databases."""
        for database in databases:
            self.connections.keep_only(database, self.dsns([database])[database], self.kept_by(database))

    def kept_by(self, database: str) -> Kept:
        """The consumers in the home database that read a remote database."""
        node = self.home.execute("SELECT pgtrickle._node()").fetchone()
        assert node is not None
        rows = self.home.execute(
            "SELECT d.pgt_id, f.source_relid FROM pgtrickle.pgt_foreign_tables f"
            " JOIN pgtrickle.pgt_dependencies d ON d.source_relid = f.relid WHERE f.database = %s",
            (database,),
        ).fetchall()
        return Kept(node[0], tuple((f"{node[0]}/{pgt_id}", there) for pgt_id, there in rows))

    def prove(self, works: Sequence[Work]) -> None:
        """Commit the proofs of this refresh in the databases from which something was read, between cut and apply."""
        moved_on: dict[tuple[str, str, str], list[Work]] = defaultdict(list)
        for work in works:
            for database, proof in _new_proofs(work).items() if work.error is None else ():
                moved_on[database, proof, work.incarnations[database]].append(work)
        for (database, proof, incarnation), moved in moved_on.items():
            before = [known_of(work, database) for work in moved]
            consumers = [work.foreign[0].consumer for work in moved]
            try:
                ((number,),) = self.ask(
                    database,
                    "SELECT pgtrickle._prove(%s::text[], %s::pg_snapshot[], %s::uuid[], %s, %s)",
                    (
                        consumers,
                        [str(one.snapshot) if one is not None else None for one in before],
                        [one.proof if one is not None else None for one in before],
                        proof,
                        incarnation,
                    ),
                )
            except (psycopg.Error, PgtrickleError) as error:
                self.note(error, moved)
                continue
            if number == len(moved):
                continue
            for work in moved:
                why = "was restarted while it was read" if number < 0 else f"forgot that {work.row.label} reads it"
                work.error = DatabaseFailedError(f"database {database} {why}", "The next refresh reads it again.")

    def altered(self, works: Sequence[Work]) -> list[Work]:
        """The works whose remote sources have other partitions, triggers or functions than when they were read."""
        found = replaced_functions(self, works)
        for database in dict.fromkeys(name for work in works for name in work.cut_databases):
            signatures = {
                source.there: source.signature
                for work in works
                for source in work.sources
                if source.database == database and source.attached
            }
            try:
                rows = self.ask(
                    database,
                    "SELECT r, pgtrickle._capture_signature(r::oid::regclass) FROM unnest(%s::bigint[]) AS r",
                    (list(signatures),),
                )
            except (psycopg.Error, PgtrickleError) as error:
                self.note(error, [work for work in works if database in work.row.databases])
                continue
            altered = {relid for relid, signature in rows if signature != signatures[relid]}
            found += [
                work for work in works if any(one.database == database and one.there in altered for one in work.sources)
            ]
        return found

    def purge(self, works: Sequence[Work]) -> None:
        """Purge changes that all their readers have applied. If that fails, a later refresh does it."""
        for database in dict.fromkeys(name for work in works for name in work.cut_databases):
            names = {one.stable_name for work in works for one in work.sources if one.database == database}
            try:
                self.ask(
                    database,
                    "SELECT pgtrickle._purge(n) FROM unnest(%s::text[]) AS n",
                    (sorted(name for name in names if name is not None),),
                )
            except (psycopg.OperationalError, psycopg.errors.UndefinedObject, DatabaseFailedError):
                if self.home.broken or self.home.closed:
                    raise


def known_of(work: Work, database: str) -> Reflected | None:
    """The stored frontier's entry for a remote database."""
    frontier = Frontier.from_json(work.row.frontier)
    return frontier.databases.get(database) if frontier is not None else None


def _new_proofs(work: Work) -> dict[str, str]:
    """The proofs in the frontier to store that are not in the stored one, by database."""
    if work.frontier is None:
        return {}
    found = {}
    for database, now in work.frontier.databases.items():
        before = known_of(work, database)
        if before is None or before.proof != now.proof:
            found[database] = now.proof
    return found

"""Remote databases that stream tables read: stand-ins, subscriptions, and the row that each refresh updates there.

Another server may forget transactions that a frontier counts as read. A crash may undo transactions that a cut has
seen, and after a restore, other transactions may get their IDs. So a refresh commits a proof there, on disk, before it
applies what it has read. If the next refresh does not find the proof, it re-initializes the stream table. The same row
keeps changes that the stream table still needs from being purged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psycopg
from psycopg.rows import class_row

from pgtrickle.catalog.databases import is_node
from pgtrickle.catalog.gate import is_administrator, pass_gate
from pgtrickle.catalog.query_files import load_query
from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.errors import DatabaseFailedError, PgtrickleError
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.protocol import Interests
from pgtrickle.sites.remote.connections import Connections, Kept, check_catalog, dsn_from, errors_naming
from pgtrickle.sites.remote.foreign_servers import ForeignServers
from pgtrickle.sites.remote.functions import replaced_functions
from pgtrickle.sites.shared_cut import Brokers, Interest
from pgtrickle.sites.source import ForeignSource
from pgtrickle.sites.stream_tables import CutStreamTable, StreamTable, known_of

R = TypeVar("R", bound=CutStreamTable)


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

    def sources(self, rows: Iterable[StreamTableRow]) -> list[ForeignSource]:
        """The tables of remote databases that these stream tables read."""
        ids = [row.pgt_id for row in rows if row.databases]
        if not ids:
            return []
        with self.home.cursor(row_factory=class_row(ForeignSource)) as cursor:
            return cursor.execute(load_query("foreign_sources"), {"ids": ids}).fetchall()

    def dsns(self, names: Collection[str]) -> dict[str, str]:
        if not names:
            return {}
        rows = self.home.execute(
            "SELECT n, pgtrickle._database_dsn(n) FROM unnest(%s::text[]) AS n", (sorted(names),)
        ).fetchall()
        return {name: dsn_from(self.home, name, dsn) for name, dsn in rows}

    def want(self, interests: Interests) -> None:
        """Register with the brokers what they did not offer, to be offered from now on."""
        wanted: dict[tuple[str, str], tuple[Mapping[str, str], dict[str, Interest]]] = {}
        for settings, databases in interests:
            for database, sources in databases.items():
                _, known = wanted.setdefault((database, repr(sorted(settings.items()))), (settings, {}))
                for name, interest in sources.items():
                    known.setdefault(name, Interest()).add(interest)
        if self.brokers is None or not wanted:
            return
        dsns = self.dsns({database for database, _ in wanted})
        node = self.home.execute("SELECT pgtrickle._database_identity()").fetchone()
        assert node is not None
        for (database, _), (settings, lacking) in wanted.items():
            self.brokers.want(database, dsns[database], node[0], self.home.info.dbname, lacking, settings)

    def realign(self, reader: StreamTable, sources: Iterable[ForeignSource], failed: Failures) -> None:
        """Update the stand-ins of remote tables that a stream table reads."""
        for source in sources:
            try:
                self._look_again(source)
            except (psycopg.Error, PgtrickleError) as error:
                kept = source.shard and reader.row.lost_members == "keep" and not is_node(source.database)
                if not (kept and isinstance(error, DatabaseFailedError)):
                    self.note(error, [reader], failed)

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
            "SELECT pgtrickle._describe_table(pgtrickle._locate_table(%s, %s, %s, %s))",
            (source.node, source.there, source.schema, source.name),
        )
        pass_gate(self.home, "import_table", database=source.database, definition=found)

    def import_table(self, database: str, table: str) -> None:
        """Create or update the stand-in of a remote table."""
        with self.open(database) as conn, errors_naming(database):
            check_catalog(conn, database)
        try:
            ((found,),) = self.ask(database, "SELECT pgtrickle._describe_table(%s::regclass)", (table,))
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            raise NotThereError(database, table) from error
        pass_gate(self.home, "import_table", database=database, definition=found)

    def subscribe(self, reader: StreamTable, relids: Collection[int], failed: Failures) -> bool:
        """Set up capture for a stream table, or make it fit tables that were altered; return whether that succeeded."""
        if not relids:
            return True
        if not is_administrator(self.home):  # for others, the service subscribes to nodes at the first refresh
            relids = {
                one.relid for one in self.sources([reader.row]) if one.relid in relids and not is_node(one.database)
            }
        self.realign(reader, [source for source in self.sources([reader.row]) if source.relid in relids], failed)
        for source in self.sources([reader.row]) if failed.of(reader) is None else ():
            if source.relid not in relids:
                continue
            try:
                self.ask(
                    source.database,
                    "SELECT pgtrickle._subscribe(%s, %s, %s::oid::regclass, %s::smallint[])",
                    (source.consumer, source.label, source.there, source.columns),
                )
            except (psycopg.Error, PgtrickleError) as error:
                self.note(error, [reader], failed)
        return failed.of(reader) is None

    def note(self, error: Exception, readers: Iterable[StreamTable], failed: Failures) -> None:
        """Let the readers of a remote database fail with its error; raise it if the home connection is lost."""
        if self.home.broken or self.home.closed:
            raise error
        failed.add(error, readers)

    def unsubscribe_dropped(self, databases: Sequence[str]) -> None:
        """Remove the subscriptions of dropped stream tables from these databases."""
        for database in databases:
            self.connections.keep_only(database, self.dsns([database])[database], self.kept_by(database))

    def kept_by(self, database: str) -> Kept:
        """The consumers in the home database that read a remote database."""
        node = self.home.execute("SELECT pgtrickle._database_identity()").fetchone()
        assert node is not None
        rows = self.home.execute(
            "SELECT d.pgt_id, f.source_relid FROM pgtrickle.pgt_foreign_tables f"
            " JOIN pgtrickle.pgt_dependencies d ON d.source_relid = f.relid WHERE f.database = %s",
            (database,),
        ).fetchall()
        return Kept(node[0], tuple((f"{node[0]}/{pgt_id}", there) for pgt_id, there in rows))

    def prove(self, readers: Sequence[CutStreamTable], failed: Failures) -> None:
        """Commit the proofs of this refresh in the databases from which something was read, between cut and apply."""
        moved_on: dict[tuple[str, str, str], list[CutStreamTable]] = defaultdict(list)
        for reader in failed.healthy(readers):
            for database, proof in _new_proofs(reader).items():
                moved_on[database, proof, reader.remote.incarnations[database]].append(reader)
        for (database, proof, incarnation), moved in moved_on.items():
            before = [known_of(reader.row, database) for reader in moved]
            consumers = [reader.remote.sources[0].consumer for reader in moved]
            try:
                ((number,),) = self.ask(
                    database,
                    "SELECT pgtrickle._store_proof(%s::text[], %s::pg_snapshot[], %s::uuid[], %s, %s)",
                    (
                        consumers,
                        [str(one.snapshot) if one is not None else None for one in before],
                        [one.proof if one is not None else None for one in before],
                        proof,
                        incarnation,
                    ),
                )
            except (psycopg.Error, PgtrickleError) as error:
                self.note(error, moved, failed)
                continue
            if number == len(moved):
                continue
            for reader in moved:
                why = "was restarted while it was read" if number < 0 else f"forgot that {reader.row.label} reads it"
                failed.add(
                    DatabaseFailedError(f"database {database} {why}", "The next refresh reads it again."), [reader]
                )

    def altered(self, readers: Sequence[R], failed: Failures) -> list[R]:
        """Those whose remote sources have other partitions, triggers or functions than when they were read."""
        found = replaced_functions(self, readers, failed)
        for database in dict.fromkeys(name for reader in readers for name in reader.remote.databases):
            signatures = {
                source.there: source.signature
                for reader in readers
                for source in reader.sources
                if source.database == database and source.attached
            }
            try:
                rows = self.ask(
                    database,
                    "SELECT r, pgtrickle._capture_signature(r::oid::regclass) FROM unnest(%s::bigint[]) AS r",
                    (list(signatures),),
                )
            except (psycopg.Error, PgtrickleError) as error:
                self.note(error, [reader for reader in readers if database in reader.row.databases], failed)
                continue
            altered = {relid for relid, signature in rows if signature != signatures[relid]}
            found += [
                reader
                for reader in readers
                if any(one.database == database and one.there in altered for one in reader.sources)
            ]
        return found

    def purge(self, readers: Sequence[CutStreamTable]) -> None:
        """Purge changes that all their readers have applied. If that fails, a later refresh does it."""
        for database in dict.fromkeys(name for reader in readers for name in reader.remote.databases):
            names = {one.stable_name for reader in readers for one in reader.sources if one.database == database}
            try:
                self.ask(
                    database,
                    "SELECT pgtrickle._purge(n) FROM unnest(%s::text[]) AS n",
                    (sorted(name for name in names if name is not None),),
                )
            except (psycopg.OperationalError, psycopg.errors.UndefinedObject, DatabaseFailedError):
                if self.home.broken or self.home.closed:
                    raise


def _new_proofs(reader: CutStreamTable) -> dict[str, str]:
    """The proofs in the frontier to store that are not in the stored one, by database."""
    found = {}
    for database, now in reader.frontier.databases.items():
        before = known_of(reader.row, database)
        if before is None or before.proof != now.proof:
            found[database] = now.proof
    return found

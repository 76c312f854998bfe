"""Cuts of all remote databases that some stream tables read. All nodes of a cluster are cut at one point in time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psycopg

from pgtrickle.catalog.databases import is_node
from pgtrickle.errors import DatabaseFailedError, PgtrickleError, SourceLockedError
from pgtrickle.sites.citus.cluster import Barrier
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.protocol import SiteCuts
from pgtrickle.sites.remote.connections import check_catalog, errors_naming
from pgtrickle.sites.remote.cut import RemoteCut, end_cut, shards_on, take_brokered_cut, take_remote_cut
from pgtrickle.sites.remote.databases import RemoteDatabases
from pgtrickle.sites.remote.functions import compare_functions
from pgtrickle.sites.source import ForeignSource
from pgtrickle.sites.stream_tables import CutStreamTable, PlannedStreamTable, RemoteReading, StreamTable, known_of

R = TypeVar("R")
V = TypeVar("V")
BROKERED_CUTS = 2
AT_ONCE = 8  # databases that are queried concurrently


@dataclass
class RemoteCuts:
    """Takes cuts of remote databases. Capture of new members of sets is set up before."""

    remote: RemoteDatabases

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.remote.connections)

    @contextmanager
    def cut(self, readers: Sequence[PlannedStreamTable], failed: Failures) -> Iterator[SiteCuts]:
        """Cuts of all remote databases that these stream tables read.

        If a database cannot be cut, the stream tables that read it fail. Members of a set that have no news are
        skipped.
        """
        self._check_use(readers, failed)
        readers = failed.healthy(readers)
        self._join(readers, failed)
        sources = self.remote.sources(reader.row for reader in readers)
        if not sources and not any(reader.row.spread_here for reader in readers):
            yield SiteCuts()
            return
        wanted = {name: [one for one in sources if one.database == name] for name in {one.database for one in sources}}
        dsns = self.remote.dsns(wanted)
        cuts: dict[str, RemoteCut] = {}
        with ExitStack() as stack:
            looked = _at_once(partial(self._has_news, readers, dsns), _may_rest(readers, wanted))
            if any(is_node(name) and news is True for name, news in looked.items()):
                looked = {name: news for name, news in looked.items() if not is_node(name)}  # all nodes, or none
            resting = any(is_node(name) for name, news in looked.items() if news is False)
            for database in [name for name, news in looked.items() if news is not True]:
                del wanted[database]
                self._lose(looked[database], database, readers, sources, failed)
            nodes = {name: dsns[name] for name in sorted(wanted) if is_node(name)}
            on_nodes = bool(nodes) or (not resting and any(reader.row.spread_here for reader in readers))
            if on_nodes and not self._raise_barrier(stack, nodes, readers, failed):
                wanted = {name: of for name, of in wanted.items() if not is_node(name)}
                on_nodes, nodes = False, {}
            shared: set[str] = set()
            # Nodes take no offers, because they are cut at one point in time. Neither do queries that call user-defined
            # functions: the rows of an offer were computed before these functions could be compared.
            if self.remote.brokers is not None:
                shared = wanted.keys() - _read_whole(readers) - nodes.keys()
                shared -= {name for reader in readers if reader.functions for name in reader.row.databases}
            for database, found in _at_once(partial(self._enter, readers, dsns, shared), wanted).items():
                if isinstance(found, Exception):
                    self._lose(found, database, readers, sources, failed)
                else:
                    stack.push(found[0].__exit__)
                    cuts[database] = found[1]
            _refuse_twins(cuts, readers, failed)
            versions = compare_functions(self.remote, cuts, readers, failed)
            if on_nodes:
                self._require_all_nodes(readers, failed)
            readings = {
                reader.row.pgt_id: _reading(reader, sources, cuts, versions.get(reader.row.pgt_id, {}))
                for reader in readers
            }
            yield SiteCuts(cuts, readings, self.barrier.is_up, self.barrier.lift)

    def _raise_barrier(
        self, stack: ExitStack, nodes: Mapping[str, str], readers: Sequence[PlannedStreamTable], failed: Failures
    ) -> bool:
        """Raise the barrier on the coordinator and these nodes, and return whether that succeeded.

        If it did not, the stream tables that read nodes fail.
        """
        try:
            stack.enter_context(self.barrier.raised(self.remote.home, nodes))
        except (psycopg.Error, PgtrickleError) as error:
            if self.remote.home.broken or self.remote.home.closed:
                raise
            self.remote.note(error, [reader for reader in readers if reader.row.on_nodes], failed)
            return False
        return True

    def _require_all_nodes(self, readers: Sequence[PlannedStreamTable], failed: Failures) -> None:
        """Let stream tables fail whose tables have shards on a node that they are not read from.

        While the barrier is up, shards cannot move to another node.
        """
        rows = self.remote.home.execute(
            "SELECT d.pgt_id, d.through::text, pgtrickle._unread_node(d.through) FROM pgtrickle.pgt_dependencies d"
            " WHERE d.pgt_id = ANY (%s) AND pgtrickle._unread_node(d.through) IS NOT NULL",
            ([reader.row.pgt_id for reader in readers],),
        ).fetchall()
        for pgt_id, table, node in rows:
            error = SourceLockedError(f"shards of {table} have come to {node}", "A service tries again by itself.")
            self.remote.note(error, [reader for reader in readers if reader.row.pgt_id == pgt_id], failed)

    def _has_news(
        self,
        readers: Sequence[PlannedStreamTable],
        dsns: Mapping[str, str],
        database: str,
        sources: Sequence[ForeignSource],
    ) -> bool:
        """Whether a set member has changes for one of these stream tables, or has changed since their last refresh."""
        consumers = {source.consumer: source.pgt_id for source in sources}
        known = {reader.row.pgt_id: known_of(reader.row, database) for reader in readers}
        with self.remote.connections.open(database, dsns[database]) as conn, errors_naming(database):
            rows = conn.execute(
                "SELECT consumer, state, xids, relids, proofs FROM pgtrickle._poll_consumers(%s)", (list(consumers),)
            ).fetchall()
        if len(rows) < len(consumers):
            return True
        for consumer, state, xids, relids, proofs in rows:
            reflected = known[consumers[consumer]]
            tables = {source.there for source in sources if source.consumer == consumer}
            if reflected is None or self.remote.connections.looks.get((dsns[database], consumer)) != state:
                return True
            if tables != set(relids) or not all(reflected.proof in each for each in proofs):
                return True
            if not all(reflected.snapshot.sees(xid) for xid in xids):
                return True
        return False

    def _lose(
        self,
        found: Exception | bool,
        database: str,
        readers: Sequence[PlannedStreamTable],
        sources: Sequence[ForeignSource],
        failed: Failures,
    ) -> None:
        """Let the readers of a database that could not be cut fail.

        Stream tables with `lost_members` = keep do not fail if a set member cannot be reached, which stays as last
        read.
        """
        if isinstance(found, Exception):
            lost = isinstance(found, DatabaseFailedError | SourceLockedError)
            affected = [reader for reader in readers if database in reader.row.databases]
            self.remote.note(found, [one for one in affected if not (lost and _keeps(one, database, sources))], failed)

    def _enter(
        self,
        readers: Sequence[PlannedStreamTable],
        dsns: Mapping[str, str],
        shared: Collection[str],
        database: str,
        sources: Sequence[ForeignSource],
    ) -> tuple[AbstractContextManager[RemoteCut], RemoteCut]:
        proofs: dict[str, str] = {}
        if database in shared:
            consumers = {source.pgt_id: source.consumer for source in sources}
            known = {
                consumers[reader.row.pgt_id]: known_of(reader.row, database)
                for reader in readers
                if reader.row.pgt_id in consumers
            }
            proofs = {consumer: one.proof for consumer, one in known.items() if one is not None}
        cut = self._cut(database, dsns[database], sources, proofs)
        return cut, cut.__enter__()

    def _take_brokered(
        self,
        conn: psycopg.Connection[Any],
        database: str,
        dsn: str,
        sources: Sequence[ForeignSource],
        proofs: Mapping[str, str],
    ) -> RemoteCut | None:
        """A cut in a broker's snapshot, if possible. If an offer is too old for a consumer, the next one is tried."""
        assert self.remote.brokers is not None
        for _ in range(BROKERED_CUTS):
            shared_cut = self.remote.brokers.shared_cut(database, dsn, sources[0].node, sorted(proofs))
            if shared_cut is None:
                return None
            cut = take_brokered_cut(conn, database, sources, shared_cut, proofs)
            if cut is not None:
                return cut
        return None

    def resolve_redirected(self, tables: Sequence[StreamTable], failed: Failures) -> dict[int, list[str]]:
        """Resolve foreign tables again whose options have changed: they now stand for another table.

        Returns the databases that these stream tables read now, by id.
        """
        followed = {}
        for source in [one for one in self.remote.sources(table.row for table in tables) if one.redirected]:
            readers = [one for one in failed.healthy(tables) if one.row.pgt_id == source.pgt_id]
            try:
                if self.remote.servers.resolve(source.relid) is None:
                    raise DatabaseFailedError(
                        f"a foreign table was {source.database}.{source.schema}.{source.name} and points elsewhere now,"
                        " to no registered database",
                        "Register that database, or tell which it is: pgtrickle database resolve TABLE --as NAME.",
                    )
            except psycopg.errors.InsufficientPrivilege as error:
                for one in readers:
                    failed.suspend(one, error.diag.message_primary or str(error))
                continue
            except (psycopg.Error, PgtrickleError) as error:
                self.remote.note(error, readers, failed)
                continue
            for one in readers:
                followed[one.row.pgt_id] = sorted({now.database for now in self.remote.sources([one.row])})
        return followed

    def _check_use(self, readers: Sequence[PlannedStreamTable], failed: Failures) -> None:
        """Suspend stream tables whose owners have no right to use a registered database that they read."""
        ids = [reader.row.pgt_id for reader in readers if reader.row.databases]
        if not ids:
            return
        rows = self.remote.home.execute(
            "SELECT id, problem FROM pgtrickle._database_use_problems(%s)", (ids,)
        ).fetchall()
        problems = dict(rows)
        for reader in failed.healthy(readers):
            if reader.row.pgt_id in problems:
                failed.suspend(reader, problems[reader.row.pgt_id])

    def _join(self, readers: Sequence[PlannedStreamTable], failed: Failures) -> None:
        """Set up capture of tables of databases that have become set members since the last refresh."""
        for reader in failed.healthy(readers):
            row = reader.row
            if row.frontier is None or not row.databases:
                continue
            new = [one for one in self.remote.sources([row]) if one.shard and known_of(row, one.database) is None]
            if not new or self.remote.subscribe(reader, {source.relid for source in new}, failed):
                continue
            may_wait = row.lost_members == "keep" and not any(is_node(source.database) for source in new)
            if isinstance(failed.of(reader), DatabaseFailedError) and may_wait:
                failed.forgive(reader)

    def remember(self, readers: Sequence[CutStreamTable]) -> None:
        """Remember the state of set members at this refresh, to recognize members without news later."""
        try:
            dsns = self.remote.dsns({name for reader in readers for name in reader.remote.states})
        except psycopg.errors.UndefinedObject:
            return  # a database was removed meanwhile; all are then cut once more
        for reader in readers:
            for database, state in reader.remote.states.items():
                self.remote.connections.looks[dsns[database], reader.remote.sources[0].consumer] = state

    @contextmanager
    def _cut(
        self, database: str, dsn: str, sources: Sequence[ForeignSource], proofs: Mapping[str, str]
    ) -> Iterator[RemoteCut]:
        with self.remote.connections.open(database, dsn) as conn:
            try:
                with errors_naming(database):
                    check_catalog(conn, database)
                    cut = self._take_brokered(conn, database, dsn, sources, proofs) if proofs else None
                    if cut is None:
                        shards = shards_on(conn, sources) if is_node(database) else []
                        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                        cut = take_remote_cut(conn, database, sources, locked=shards)
                yield cut
            finally:
                end_cut(conn)


def _reading(
    reader: PlannedStreamTable,
    sources: Sequence[ForeignSource],
    cuts: Mapping[str, RemoteCut],
    functions: Mapping[str, Mapping[str, str]],
) -> RemoteReading:
    mine = tuple(source for source in sources if source.pgt_id == reader.row.pgt_id)
    states = {
        name: cut.looks[consumer]
        for name, cut in cuts.items()
        for consumer in {source.consumer for source in mine if source.database == name}
        if consumer in cut.looks
    }
    incarnations = {name: cuts[name].incarnation for name in reader.row.databases if name in cuts}
    return RemoteReading(mine, states, functions, incarnations)


def _refuse_twins(cuts: Mapping[str, RemoteCut], readers: Sequence[PlannedStreamTable], failed: Failures) -> None:
    """Let stream tables fail that read one database under two names: it would be cut at two points in time."""
    by_node: dict[str, str] = {}
    for name, cut in cuts.items():
        other = by_node.setdefault(cut.node, name)
        if other != name:
            error = DatabaseFailedError(
                f"{other} and {name} are the same database",
                f"Register only one of them, and name its tables as {other}.schema.table.",
            )
            failed.add(error, [reader for reader in readers if {name, other} <= set(reader.row.databases)])


def _may_rest(
    readers: Sequence[PlannedStreamTable], wanted: Mapping[str, Sequence[ForeignSource]]
) -> dict[str, Sequence[ForeignSource]]:
    """Databases that need not be cut if they have no news: set members that all their readers have read before."""
    whole = _read_whole(readers)
    # Changes on the coordinator and on the nodes may belong to the same transactions.
    if any(is_node(name) for name in whole) or any(reader.row.reads_here for reader in readers):
        whole |= {name for name in wanted if is_node(name)}
    return {name: of for name, of in wanted.items() if all(one.shard for one in of) and name not in whole}


def _read_whole(readers: Sequence[PlannedStreamTable]) -> set[str]:
    """Databases from which some stream table will certainly read more than changes."""
    return {
        name
        for reader in readers
        for name in reader.row.databases
        if reader.whole
        or reader.row.frontier is None
        or reader.row.reinit_reason is not None
        or known_of(reader.row, name) is None
    }


def _keeps(reader: PlannedStreamTable, database: str, sources: Sequence[ForeignSource]) -> bool:
    """Whether a database that cannot be reached stays as last read. It cannot if its rows are needed now."""
    row = reader.row
    if row.lost_members != "keep" or reader.whole or row.frontier is None or is_node(database):
        return False
    mine = (one for one in sources if one.pgt_id == row.pgt_id and one.database == database)
    return row.reinit_reason is None and any(one.shard for one in mine)


def _at_once(call: Callable[[str, V], R], of: Mapping[str, V]) -> dict[str, R | Exception]:
    """Call a function for several databases concurrently; return the result or the error of each."""

    def attempt(item: tuple[str, V]) -> R | Exception:
        try:
            return call(*item)
        except (psycopg.Error, PgtrickleError) as error:
            return error

    if len(of) < 2:
        return {item[0]: attempt(item) for item in of.items()}
    with ThreadPoolExecutor(min(len(of), AT_ONCE), "pgtrickle-remote") as pool:
        return dict(zip(of, pool.map(attempt, of.items()), strict=True))

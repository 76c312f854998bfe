"""Cuts of all remote databases that some stream tables read. All nodes of a cluster are cut at one point in time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from pgtrickle.catalog.databases import is_node
from pgtrickle.catalog.problems import lacking
from pgtrickle.errors import DatabaseFailedError, PgtrickleError, SourceLockedError
from pgtrickle.sites.citus.cluster import Barrier
from pgtrickle.sites.remote.connections import check_catalog, errors_naming
from pgtrickle.sites.remote.cut import ForeignSource, RemoteCut, end_cut, shards_on, take_brokered_cut, take_remote_cut
from pgtrickle.sites.remote.databases import RemoteDatabases, known_of
from pgtrickle.sites.remote.functions import compare_functions

if TYPE_CHECKING:
    from pgtrickle.refresh.work import Work

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
    def cut(self, works: Sequence[Work]) -> Iterator[dict[str, RemoteCut]]:
        """Cuts of all remote databases that these stream tables read, by name.

        If a database cannot be cut, its error is set on the works that read it. Members of a set that have no news are
        skipped.
        """
        self._follow(works)
        self._check_use(works)
        works = [work for work in works if work.error is None]
        self._join(works)
        sources = self.remote.sources(works)
        if not sources and not any(work.row.spread_here for work in works):
            yield {}
            return
        for work in works:
            work.foreign = [source for source in sources if source.pgt_id == work.row.pgt_id]
        wanted = {name: [one for one in sources if one.database == name] for name in {one.database for one in sources}}
        dsns = self.remote.dsns(wanted)
        cuts: dict[str, RemoteCut] = {}
        with ExitStack() as stack:
            looked = _at_once(partial(self._has_news, works, dsns), _may_rest(works, wanted))
            if any(is_node(name) and news is True for name, news in looked.items()):
                looked = {name: news for name, news in looked.items() if not is_node(name)}  # all nodes, or none
            resting = any(is_node(name) for name, news in looked.items() if news is False)
            for database in [name for name, news in looked.items() if news is not True]:
                del wanted[database]
                self._lose(looked[database], database, works)
            nodes = {name: dsns[name] for name in sorted(wanted) if is_node(name)}
            on_nodes = bool(nodes) or (not resting and any(work.row.spread_here for work in works))
            if on_nodes and not self._raise_barrier(stack, nodes, works):
                wanted = {name: of for name, of in wanted.items() if not is_node(name)}
                on_nodes, nodes = False, {}
            shared: set[str] = set()
            # Nodes take no offers, because they are cut at one point in time. Neither do queries that call user-defined
            # functions: the rows of an offer were computed before these functions could be compared.
            if self.remote.brokers is not None:
                shared = wanted.keys() - _read_whole(works) - nodes.keys()
                shared -= {name for work in works if work.calls for name in work.row.databases}
            for database, found in _at_once(partial(self._enter, works, dsns, shared), wanted).items():
                if isinstance(found, Exception):
                    self._lose(found, database, works)
                else:
                    stack.push(found[0].__exit__)
                    cuts[database] = found[1]
            _refuse_twins(cuts, works)
            compare_functions(self.remote, cuts, works)
            if on_nodes:
                self._require_all_nodes(works)
            for work in works:
                work.looks = {
                    name: cut.looks[consumer]
                    for name, cut in cuts.items()
                    for consumer in {source.consumer for source in work.foreign if source.database == name}
                    if consumer in cut.looks
                }
            yield cuts

    def _raise_barrier(self, stack: ExitStack, nodes: Mapping[str, str], works: Sequence[Work]) -> bool:
        """Raise the barrier on the coordinator and these nodes, and return whether that succeeded.

        If it did not, the error is set on the works that read nodes.
        """
        try:
            stack.enter_context(self.barrier.raised(self.remote.home, nodes))
        except (psycopg.Error, PgtrickleError) as error:
            if self.remote.home.broken or self.remote.home.closed:
                raise
            self.remote.note(error, [work for work in works if work.row.on_nodes])
            return False
        return True

    def _require_all_nodes(self, works: Sequence[Work]) -> None:
        """Set an error on works whose tables have shards on a node that they are not read from.

        While the barrier is up, shards cannot move to another node.
        """
        rows = self.remote.home.execute(
            "SELECT d.pgt_id, d.through::text, pgtrickle._unread_node(d.through) FROM pgtrickle.pgt_dependencies d"
            " WHERE d.pgt_id = ANY (%s) AND pgtrickle._unread_node(d.through) IS NOT NULL",
            ([work.row.pgt_id for work in works],),
        ).fetchall()
        for pgt_id, table, node in rows:
            error = SourceLockedError(f"shards of {table} have come to {node}", "A service tries again by itself.")
            self.remote.note(error, [work for work in works if work.row.pgt_id == pgt_id])

    def _has_news(
        self, works: Sequence[Work], dsns: Mapping[str, str], database: str, sources: Sequence[ForeignSource]
    ) -> bool:
        """Whether a set member has changes for one of these stream tables, or has changed since their last refresh."""
        readers = {source.consumer: source.pgt_id for source in sources}
        known = {work.row.pgt_id: known_of(work, database) for work in works}
        with self.remote.connections.open(database, dsns[database]) as conn, errors_naming(database):
            rows = conn.execute(
                "SELECT consumer, state, xids, relids, proofs FROM pgtrickle._look(%s)", (list(readers),)
            ).fetchall()
        if len(rows) < len(readers):
            return True
        for consumer, state, xids, relids, proofs in rows:
            reflected = known[readers[consumer]]
            tables = {source.there for source in sources if source.consumer == consumer}
            if reflected is None or self.remote.connections.looks.get((dsns[database], consumer)) != state:
                return True
            if tables != set(relids) or not all(reflected.proof in each for each in proofs):
                return True
            if not all(reflected.snapshot.sees(xid) for xid in xids):
                return True
        return False

    def _lose(self, found: Exception | bool, database: str, works: Sequence[Work]) -> None:
        """Set the error of a database that could not be cut on the works that read it.

        Stream tables with `lost_members` = keep get none for a set member that cannot be reached, which stays as last
        read.
        """
        if isinstance(found, Exception):
            lost = isinstance(found, DatabaseFailedError | SourceLockedError)
            readers = [work for work in works if database in work.row.databases]
            self.remote.note(found, [work for work in readers if not (lost and _keeps(work, database))])

    def _enter(
        self,
        works: Sequence[Work],
        dsns: Mapping[str, str],
        shared: Collection[str],
        database: str,
        sources: Sequence[ForeignSource],
    ) -> tuple[AbstractContextManager[RemoteCut], RemoteCut]:
        proofs: dict[str, str] = {}
        if database in shared:
            readers = {source.pgt_id: source.consumer for source in sources}
            known = {readers[work.row.pgt_id]: known_of(work, database) for work in works if work.row.pgt_id in readers}
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

    def _follow(self, works: Sequence[Work]) -> None:
        """Resolve foreign tables again whose options have changed: they now stand for another table."""
        for source in [one for one in self.remote.sources(works) if one.redirected]:
            readers = [work for work in works if work.row.pgt_id == source.pgt_id and work.error is None]
            try:
                if self.remote.servers.resolve(source.relid) is None:
                    raise DatabaseFailedError(
                        f"a foreign table was {source.database}.{source.schema}.{source.name} and points elsewhere now,"
                        " to no registered database",
                        "Register that database, or tell which it is: pgtrickle database resolve TABLE --as NAME.",
                    )
            except psycopg.errors.InsufficientPrivilege as error:
                for work in readers:
                    _suspend(work, error.diag.message_primary or str(error))
                continue
            except (psycopg.Error, PgtrickleError) as error:
                self.remote.note(error, readers)
                continue
            for work in readers:
                work.row = replace(work.row, databases=sorted({one.database for one in self.remote.sources([work])}))

    def _check_use(self, works: Sequence[Work]) -> None:
        """Suspend stream tables whose owners have no right to use a registered database that they read."""
        ids = [work.row.pgt_id for work in works if work.row.databases]
        if not ids:
            return
        rows = self.remote.home.execute("SELECT id, problem FROM pgtrickle._use_problems(%s)", (ids,)).fetchall()
        problems = dict(rows)
        for work in works:
            if work.row.pgt_id in problems and work.error is None:
                _suspend(work, problems[work.row.pgt_id])

    def _join(self, works: Sequence[Work]) -> None:
        """Set up capture of tables of databases that have become set members since the last refresh."""
        for work in works:
            if work.row.frontier is None or not work.row.databases or work.error is not None:
                continue
            new = [one for one in self.remote.sources([work]) if one.shard and known_of(work, one.database) is None]
            if not new or self.remote.subscribe(work, {source.relid for source in new}):
                continue
            may_wait = work.row.lost_members == "keep" and not any(is_node(source.database) for source in new)
            if isinstance(work.error, DatabaseFailedError) and may_wait:
                work.error = None

    def remember(self, works: Sequence[Work]) -> None:
        """Remember the state of set members at this refresh, to recognize members without news later."""
        try:
            dsns = self.remote.dsns({name for work in works for name in work.looks})
        except psycopg.errors.UndefinedObject:
            return  # a database was removed meanwhile; all are then cut once more
        for work in works:
            for database, state in work.looks.items():
                self.remote.connections.looks[dsns[database], work.foreign[0].consumer] = state

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


def _suspend(work: Work, problem: str) -> None:
    work.row = replace(work.row, problem=problem)
    work.error = lacking(work.row.label, problem)


def _refuse_twins(cuts: Mapping[str, RemoteCut], works: Sequence[Work]) -> None:
    """Set an error on works that read one database under two names: it would be cut at two points in time."""
    by_node: dict[str, str] = {}
    for name, cut in cuts.items():
        other = by_node.setdefault(cut.node, name)
        if other != name:
            error = DatabaseFailedError(
                f"{other} and {name} are the same database",
                f"Register only one of them, and name its tables as {other}.schema.table.",
            )
            for work in works:
                work.error = error if {name, other} <= set(work.row.databases) else work.error


def _may_rest(
    works: Sequence[Work], wanted: Mapping[str, Sequence[ForeignSource]]
) -> dict[str, Sequence[ForeignSource]]:
    """Databases that need not be cut if they have no news: set members that all their readers have read before."""
    whole = _read_whole(works)
    # Changes on the coordinator and on the nodes may belong to the same transactions.
    if any(is_node(name) for name in whole) or any(work.row.reads_here for work in works):
        whole |= {name for name in wanted if is_node(name)}
    return {name: of for name, of in wanted.items() if all(one.shard for one in of) and name not in whole}


def _read_whole(works: Sequence[Work]) -> set[str]:
    """Databases from which some work will certainly read more than changes."""
    return {
        name
        for work in works
        for name in work.row.databases
        if work.needs_all
        or work.row.frontier is None
        or work.row.reinit_reason is not None
        or known_of(work, name) is None
    }


def _keeps(work: Work, database: str) -> bool:
    """Whether a database that cannot be reached stays as last read. It cannot if its rows are needed now."""
    if work.row.lost_members != "keep" or work.needs_all or work.row.frontier is None or is_node(database):
        return False
    return work.row.reinit_reason is None and any(one.shard and one.database == database for one in work.foreign)


def _at_once(call: Callable[[str, V], R], of: Mapping[str, V]) -> dict[str, R | Exception]:
    """Call a function for several databases concurrently; return the result or the error of each."""

    def attempt(item: tuple[str, V]) -> R | Exception:
        try:
            return call(*item)
        except (psycopg.Error, PgtrickleError) as error:
            return error

    if len(of) < 2:
        return {item[0]: attempt(item) for item in of.items()}
    with ThreadPoolExecutor(min(len(of), AT_ONCE), "pgtrickle-elsewhere") as pool:
        return dict(zip(of, pool.map(attempt, of.items()), strict=True))

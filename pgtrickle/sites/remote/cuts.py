"""Cuts of all other databases that some stream tables read: each at one moment, nodes of a cluster all at the same."""

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
AT_ONCE = 8  # databases that are asked at the same time


@dataclass
class RemoteCuts:
    """Takes them, and has what is new there captured before."""

    remote: RemoteDatabases

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.remote.connections)

    @contextmanager
    def cut(self, works: Sequence[Work]) -> Iterator[dict[str, RemoteCut]]:
        """Cuts of all databases that these stream tables read; who reads one that cannot be cut gets its error.

        Members of a set that have no news are left alone.
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
            if self.remote.brokers is not None:  # a broker's rows were computed before we could look at functions
                shared = wanted.keys() - _read_whole(works) - nodes.keys()  # nodes are cut at one moment
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
        """Whether the coordinator and these nodes can be cut at one moment; if not, who reads them is told why."""
        try:
            stack.enter_context(self.barrier.raised(self.remote.home, nodes))
        except (psycopg.Error, PgtrickleError) as error:
            if self.remote.home.broken or self.remote.home.closed:
                raise
            self.remote.note(error, [work for work in works if work.row.on_nodes])
            return False
        return True

    def _require_all_nodes(self, works: Sequence[Work]) -> None:
        """While the barrier is up no shard changes its node: are those cut that have some?"""
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
        """Whether a member of a set has changes for one of these stream tables, or is not what it was."""
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
        """A member of a set that cannot be reached stays as it was last read, for stream tables that want it so."""
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
        """A cut that a broker offers; the next one, where the first was taken before somebody had proved his last."""
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
        """Foreign tables that were pointed elsewhere stand for another table from now on."""
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
        """Stream tables whose owners may not use a registered database, or not any more, are suspended."""
        ids = [work.row.pgt_id for work in works if work.row.databases]
        if not ids:
            return
        rows = self.remote.home.execute("SELECT id, problem FROM pgtrickle._use_problems(%s)", (ids,)).fetchall()
        problems = dict(rows)
        for work in works:
            if work.row.pgt_id in problems and work.error is None:
                _suspend(work, problems[work.row.pgt_id])

    def _join(self, works: Sequence[Work]) -> None:
        """Have the changes captured of what became a member of a set since the last refresh."""
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
        """What members of sets were like when these stream tables were refreshed."""
        try:
            dsns = self.remote.dsns({name for work in works for name in work.looks})
        except psycopg.errors.UndefinedObject:
            return  # one was removed meanwhile: all are cut once more
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
    """Two names for one database would be cut at two moments, as if they were two."""
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
    """Databases that need not be cut if they have no news: members of sets, for stream tables that have read them."""
    whole = _read_whole(works)
    # What is on the coordinator belongs to the same transactions as what is on the nodes.
    if any(is_node(name) for name in whole) or any(work.row.reads_here for work in works):
        whole |= {name for name in wanted if is_node(name)}
    return {name: of for name, of in wanted.items() if all(one.shard for one in of) and name not in whole}


def _read_whole(works: Sequence[Work]) -> set[str]:
    """Databases of which more than changes is read for certain."""
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
    """Whether a database may be left as it was last read. Not where its rows are needed."""
    if work.row.lost_members != "keep" or work.needs_all or work.row.frontier is None or is_node(database):
        return False
    return work.row.reinit_reason is None and any(one.shard and one.database == database for one in work.foreign)


def _at_once(call: Callable[[str, V], R], of: Mapping[str, V]) -> dict[str, R | Exception]:
    """What the call gives for each of several databases, or what went wrong there."""

    def attempt(item: tuple[str, V]) -> R | Exception:
        try:
            return call(*item)
        except (psycopg.Error, PgtrickleError) as error:
            return error

    if len(of) < 2:
        return {item[0]: attempt(item) for item in of.items()}
    with ThreadPoolExecutor(min(len(of), AT_ONCE), "pgtrickle-elsewhere") as pool:
        return dict(zip(of, pool.map(attempt, of.items()), strict=True))

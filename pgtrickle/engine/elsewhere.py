"""Other databases that stream tables read: connections, cuts, and the row that each refresh leaves there.

A frontier from another server is only as good as that server's memory. A crash may take back transactions that a cut has seen,
and a restore may give their numbers to others. So a refresh commits a proof there, on disk, before it applies what it read; the
next one starts over if the proof is gone. The same row keeps the changes that the stream table still needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from pgtrickle.capture.frontier import Frontier, Reflected
from pgtrickle.catalog.analysis import load_query
from pgtrickle.engine.citus import Barrier
from pgtrickle.engine.foreign_servers import ForeignServers
from pgtrickle.engine.functions import compare_functions, replaced_functions
from pgtrickle.engine.offers import Brokers, Interest
from pgtrickle.engine.other_cut import (
    ForeignSource,
    OtherCut,
    end_cut,
    shards_on,
    take_offered_cut,
    take_other_cut,
)
from pgtrickle.engine.reach import Connections, Kept, check_catalog, dsn_from, is_node, told
from pgtrickle.errors import DatabaseFailedError, PgtrickleError, SourceLockedError

if TYPE_CHECKING:
    from pgtrickle.engine.work import Work


R = TypeVar("R")
V = TypeVar("V")
OFFERS = 2
AT_ONCE = 8  # databases that are asked at the same time


@dataclass
class NotThereError(Exception):
    """There is no such table in the other database."""

    database: str
    table: str


@dataclass
class Elsewhere:
    """What the stream tables of one database read in others."""

    home: psycopg.Connection[Any]
    connections: Connections = field(default_factory=Connections)
    brokers: Brokers | None = None  # where changes are shared with other databases

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.connections)

    @property
    def servers(self) -> ForeignServers:
        return ForeignServers(self.home, self.connections)

    @contextmanager
    def open(self, name: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection to a registered database."""
        with self.connections.open(name, self._dsns([name])[name]) as conn:
            yield conn

    def ask(self, name: str, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """What a registered database answers. What goes wrong there is told with its name."""
        with self.open(name) as conn, told(name):
            return conn.execute(query.encode(), parameters).fetchall()

    def sources(self, works: Sequence[Work]) -> list[ForeignSource]:
        """The tables of other databases that these stream tables read."""
        ids = [work.row.pgt_id for work in works if work.row.databases]
        if not ids:
            return []
        with self.home.cursor(row_factory=class_row(ForeignSource)) as cursor:
            return cursor.execute(load_query("foreign_sources"), {"ids": ids}).fetchall()

    @contextmanager
    def cut(self, works: Sequence[Work]) -> Iterator[dict[str, OtherCut]]:
        """Cuts of all databases that these stream tables read; who reads one that cannot be cut gets its error.

        Members of a set that have no news are left alone.
        """
        self._follow(works)
        self._join(works)
        sources = self.sources(works)
        if not sources and not any(work.row.spread_here for work in works):
            yield {}
            return
        for work in works:
            work.foreign = [source for source in sources if source.pgt_id == work.row.pgt_id]
        wanted = {name: [one for one in sources if one.database == name] for name in {one.database for one in sources}}
        dsns = self._dsns(wanted)
        cuts: dict[str, OtherCut] = {}
        with ExitStack() as stack:
            looked = _at_once(partial(self._has_news, works, dsns), _may_rest(works, wanted))
            if any(is_node(name) and news is True for name, news in looked.items()):
                looked = {name: news for name, news in looked.items() if not is_node(name)}  # all nodes, or none
            for database in [name for name, news in looked.items() if news is not True]:
                del wanted[database]
                self._lose(looked[database], database, works)
            nodes = {name: dsns[name] for name in sorted(wanted) if is_node(name)}
            on_nodes = bool(nodes) or any(work.row.spread_here for work in works)
            if on_nodes and not self._raise_barrier(stack, nodes, works):
                wanted = {name: of for name, of in wanted.items() if not is_node(name)}
                on_nodes, nodes = False, {}
            shared: set[str] = set()
            if self.brokers is not None:  # a broker's rows were computed before we could look at functions
                shared = wanted.keys() - _read_whole(works) - nodes.keys()  # nodes are cut at one moment
                shared -= {name for work in works if work.calls for name in work.row.databases}
            for database, found in _at_once(partial(self._enter, works, dsns, shared), wanted).items():
                if isinstance(found, Exception):
                    self._lose(found, database, works)
                else:
                    stack.push(found[0].__exit__)
                    cuts[database] = found[1]
            _refuse_twins(cuts, works)
            compare_functions(self, cuts, works)
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
            stack.enter_context(self.barrier.raised(self.home, nodes))
        except (psycopg.Error, PgtrickleError) as error:
            if self.home.broken or self.home.closed:
                raise
            self.note(error, [work for work in works if work.row.on_nodes])
            return False
        return True

    def _require_all_nodes(self, works: Sequence[Work]) -> None:
        """While the barrier is up no shard changes its node: are those cut that have some?"""
        rows = self.home.execute(
            "SELECT d.pgt_id, d.through::text, pgtrickle._unread_node(d.through) FROM pgtrickle.pgt_dependencies d"
            " WHERE d.pgt_id = ANY (%s) AND pgtrickle._unread_node(d.through) IS NOT NULL",
            ([work.row.pgt_id for work in works],),
        ).fetchall()
        for pgt_id, table, node in rows:
            error = SourceLockedError(f"shards of {table} have come to {node}", "A service tries again by itself.")
            self.note(error, [work for work in works if work.row.pgt_id == pgt_id])

    def _dsns(self, names: Collection[str]) -> dict[str, str]:
        if not names:
            return {}
        rows = self.home.execute(
            "SELECT n, pgtrickle._dsn_of(n) FROM unnest(%s::text[]) AS n", (sorted(names),)
        ).fetchall()
        return {name: dsn_from(self.home, name, dsn) for name, dsn in rows}

    def _has_news(
        self, works: Sequence[Work], dsns: Mapping[str, str], database: str, sources: Sequence[ForeignSource]
    ) -> bool:
        """Whether a member of a set has changes for one of these stream tables, or is not what it was."""
        readers = {source.consumer: source.pgt_id for source in sources}
        known = {work.row.pgt_id: _known(work, database) for work in works}
        with self.connections.open(database, dsns[database]) as conn, told(database):
            rows = conn.execute(
                "SELECT consumer, state, xids, relids, proofs FROM pgtrickle._look(%s)", (list(readers),)
            ).fetchall()
        if len(rows) < len(readers):
            return True
        for consumer, state, xids, relids, proofs in rows:
            reflected = known[readers[consumer]]
            tables = {source.there for source in sources if source.consumer == consumer}
            if reflected is None or self.connections.looks.get((dsns[database], consumer)) != state:
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
            self.note(found, [work for work in readers if not (lost and _keeps(work, database))])

    def _enter(
        self,
        works: Sequence[Work],
        dsns: Mapping[str, str],
        shared: Collection[str],
        database: str,
        sources: Sequence[ForeignSource],
    ) -> tuple[AbstractContextManager[OtherCut], OtherCut]:
        proofs: dict[str, str] = {}
        if database in shared:
            readers = {source.pgt_id: source.consumer for source in sources}
            known = {readers[work.row.pgt_id]: _known(work, database) for work in works if work.row.pgt_id in readers}
            proofs = {consumer: one.proof for consumer, one in known.items() if one is not None}
        cut = self._cut(database, dsns[database], sources, proofs)
        return cut, cut.__enter__()

    def _take_offered(
        self,
        conn: psycopg.Connection[Any],
        database: str,
        dsn: str,
        sources: Sequence[ForeignSource],
        proofs: Mapping[str, str],
    ) -> OtherCut | None:
        """A cut that a broker offers; the next one, where the first was taken before somebody had proved his last."""
        assert self.brokers is not None
        for _ in range(OFFERS):
            offer = self.brokers.offer(database, dsn, sources[0].node, sorted(proofs))
            if offer is None:
                return None
            cut = take_offered_cut(conn, database, sources, offer, proofs)
            if cut is not None:
                return cut
        return None

    def want(self, works: Sequence[Work]) -> None:
        """Let brokers read what was not offered, from now on."""
        wanted: dict[tuple[str, str], tuple[Work, dict[str, Interest]]] = {}
        for work in works:
            for database, lacking in work.lacking.items() if work.error is None else ():
                _, known = wanted.setdefault((database, repr(sorted(work.settings.items()))), (work, {}))
                for name, interest in lacking.items():
                    known.setdefault(name, Interest()).add(interest)
        if self.brokers is None or not wanted:
            return
        dsns = self._dsns({database for database, _ in wanted})
        node = self.home.execute("SELECT pgtrickle._node()").fetchone()
        assert node is not None
        for (database, _), (work, lacking) in wanted.items():
            label = self.home.info.dbname
            self.brokers.want(database, dsns[database], node[0], label, lacking, work.settings)

    def _follow(self, works: Sequence[Work]) -> None:
        """Foreign tables that were pointed elsewhere stand for another table from now on."""
        for source in [one for one in self.sources(works) if one.redirected]:
            readers = [work for work in works if work.row.pgt_id == source.pgt_id and work.error is None]
            try:
                if self.servers.resolve(source.relid) is None:
                    raise DatabaseFailedError(
                        f"a foreign table was {source.database}.{source.schema}.{source.name} and points elsewhere now,"
                        " to no registered database",
                        "Register that database, or tell which it is: pgtrickle database resolve TABLE --as NAME.",
                    )
            except (psycopg.Error, PgtrickleError) as error:
                self.note(error, readers)
                continue
            for work in readers:
                work.row = replace(work.row, databases=sorted({one.database for one in self.sources([work])}))

    def _join(self, works: Sequence[Work]) -> None:
        """Have the changes captured of what became a member of a set since the last refresh."""
        for work in works:
            if work.row.frontier is None or not work.row.databases or work.error is not None:
                continue
            new = [one for one in self.sources([work]) if one.shard and _known(work, one.database) is None]
            if not new or self.subscribe(work, {source.relid for source in new}):
                continue
            may_wait = work.row.lost_members == "keep" and not any(is_node(source.database) for source in new)
            if isinstance(work.error, DatabaseFailedError) and may_wait:
                work.error = None

    def remember(self, works: Sequence[Work]) -> None:
        """What members of sets were like when these stream tables were refreshed."""
        try:
            dsns = self._dsns({name for work in works for name in work.looks})
        except psycopg.errors.UndefinedObject:
            return  # one was removed meanwhile: all are cut once more
        for work in works:
            for database, state in work.looks.items():
                self.connections.looks[dsns[database], work.foreign[0].consumer] = state

    @contextmanager
    def _cut(
        self, database: str, dsn: str, sources: Sequence[ForeignSource], proofs: Mapping[str, str]
    ) -> Iterator[OtherCut]:
        with self.connections.open(database, dsn) as conn:
            try:
                with told(database):
                    check_catalog(conn, database)
                    cut = self._take_offered(conn, database, dsn, sources, proofs) if proofs else None
                    if cut is None:
                        shards = shards_on(conn, sources) if is_node(database) else []
                        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                        cut = take_other_cut(conn, database, sources, locked=shards)
                yield cut
            finally:
                end_cut(conn)

    def realign(self, works: Sequence[Work]) -> None:
        """Bring what stands here for tables of other databases up to date with them."""
        for work in works:
            for source in work.foreign:
                try:
                    self._look_again(source)
                except (psycopg.Error, PgtrickleError) as error:
                    kept = source.shard and work.row.lost_members == "keep" and not is_node(source.database)
                    if not (kept and isinstance(error, DatabaseFailedError)):
                        self.note(error, [work])

    def _look_again(self, source: ForeignSource) -> None:
        """At the table that it was, whatever it is called now; in another database, or made anew, at the one of that name."""
        if source.resolved:
            self.servers.resolve(source.relid, source.database)
            return
        ((found,),) = self.ask(
            source.database,
            "SELECT pgtrickle._describe_table(pgtrickle._same_table(%s, %s, %s, %s))",
            (source.node, source.there, source.schema, source.name),
        )
        self.home.execute("SELECT pgtrickle._stand_in(%s, %s)", (source.database, Jsonb(found)))

    def import_table(self, database: str, table: str) -> None:
        """Make a table of another database known here, or look at it again."""
        with self.open(database) as conn, told(database):
            check_catalog(conn, database)
        try:
            ((found,),) = self.ask(database, "SELECT pgtrickle._describe_table(%s::regclass)", (table,))
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            raise NotThereError(database, table) from error
        self.home.execute("SELECT pgtrickle._stand_in(%s, %s)", (database, Jsonb(found)))

    def subscribe(self, work: Work, relids: Collection[int]) -> bool:
        """Have changes captured for a stream table, or make their capture fit the tables as they are now."""
        if not relids:
            return True
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
        """What went wrong elsewhere is the matter of those that read there, unless it went wrong here."""
        if self.home.broken or self.home.closed:
            raise error
        for work in works:
            work.error = error

    def unsubscribe_dropped(self, databases: Sequence[str]) -> None:
        """Tell these databases which stream tables still read them."""
        for database in databases:
            self.connections.keep_only(database, self._dsns([database])[database], self.kept_by(database))

    def kept_by(self, database: str) -> Kept:
        """The stream tables here that read a database."""
        node = self.home.execute("SELECT pgtrickle._node()").fetchone()
        assert node is not None
        rows = self.home.execute(
            "SELECT d.pgt_id, f.source_relid FROM pgtrickle.pgt_foreign_tables f"
            " JOIN pgtrickle.pgt_dependencies d ON d.source_relid = f.relid WHERE f.database = %s",
            (database,),
        ).fetchall()
        return Kept(node[0], tuple((f"{node[0]}/{pgt_id}", there) for pgt_id, there in rows))

    def prove(self, works: Sequence[Work]) -> None:
        """Commit, where something was read, that it was: between cut and apply."""
        moved_on: dict[tuple[str, str, str], list[Work]] = defaultdict(list)
        for work in works:
            for database, proof in _new_proofs(work).items() if work.error is None else ():
                moved_on[database, proof, work.incarnations[database]].append(work)
        for (database, proof, incarnation), moved in moved_on.items():
            before = [_known(work, database) for work in moved]
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
        """Those whose sources elsewhere have other partitions, capture triggers or functions than when they were read."""
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
        """Remove changes that all who read them have stored. Another refresh does it where that fails."""
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


def _refuse_twins(cuts: Mapping[str, OtherCut], works: Sequence[Work]) -> None:
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
        or _known(work, name) is None
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


def _known(work: Work, database: str) -> Reflected | None:
    """What the stored frontier says of another database."""
    frontier = Frontier.from_json(work.row.frontier)
    return frontier.databases.get(database) if frontier is not None else None


def _new_proofs(work: Work) -> dict[str, str]:
    """The proofs that the frontier to store speaks of and the stored one does not."""
    if work.frontier is None:
        return {}
    found = {}
    for database, now in work.frontier.databases.items():
        before = _known(work, database)
        if before is None or before.proof != now.proof:
            found[database] = now.proof
    return found

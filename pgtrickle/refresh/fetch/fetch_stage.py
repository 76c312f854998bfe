"""The stage that reads what the jobs of refreshes need, in the snapshot of their cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from pgtrickle.catalog.databases import is_node
from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.compile.sql_text import SHARDS
from pgtrickle.enums import Action, RefreshMode
from pgtrickle.errors import PgtrickleError
from pgtrickle.postgres import fence
from pgtrickle.postgres.connection import is_pooled
from pgtrickle.postgres.copying import ResultTooLargeError
from pgtrickle.postgres.transactions import export, set_local
from pgtrickle.refresh.cut.cut import Cut
from pgtrickle.refresh.decide.cost import is_large
from pgtrickle.refresh.decide.decider import Decider
from pgtrickle.refresh.fetch.brokered import take_brokered
from pgtrickle.refresh.fetch.fetcher import Fetcher
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.refresh.fetch.medium import HelperRead, InMemory
from pgtrickle.refresh.fetch.reader import Reader
from pgtrickle.refresh.fetch.shared_scan import read_shared_scans
from pgtrickle.refresh.progress import Progress
from pgtrickle.refresh.stages import Decided, Fetched
from pgtrickle.sites.citus.shards import Shards
from pgtrickle.sites.shared_cut import Interest

if TYPE_CHECKING:
    from pgtrickle.refresh.compute.large import LargeRefresh

# Settings for printing values and reading them back; the stream table's own settings are added.
TRANSPORT = {
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "xmlbinary": "base64",
    "search_path": "pg_catalog, pg_temp",
}


@dataclass(frozen=True)
class Announced:
    """A stream table that has announced what it will read, so that several can read it together."""

    decided: Decided
    settings: Mapping[str, str] = field(default_factory=dict)  # for reading the sources
    fetcher: Fetcher[Any] | None = None  # of Arrow tables, or of Spark DataFrames in a large refresh; None: no reads
    large: LargeRefresh | None = None

    @property
    def row(self) -> StreamTableRow:
        return self.decided.row

    @property
    def is_complete(self) -> bool:
        """Whether all databases were cut that will be read. Some may have been skipped for lack of news."""
        return self.fetcher is None or self.fetcher.databases <= self.fetcher.readers.keys()


@dataclass
class FetchStage:
    """The reads at one cut: `announce()` for all stream tables, then `read_together()` once, then `fetch()` for each."""

    conn: psycopg.Connection[Any]
    cut: Cut
    decider: Decider
    progress: Progress
    statements: list[str]  # that were sent to the sources
    large_bytes: int  # of table files from which on rows bypass the driver
    helpers: HelperProcesses | None
    readers_of: Counter[int]  # stream tables that read a changed source, by its OID
    wanted: list[tuple[Mapping[str, str], Mapping[str, Mapping[str, Interest]]]] = field(default_factory=list)
    _media: dict[Any, InMemory] = field(default_factory=dict)

    def announce(self, decided: Decided) -> Announced:
        """Announce what the job of a stream table will read."""
        row = decided.row
        if decided.job is None:
            return Announced(decided)
        settings = TRANSPORT | row.query_settings
        if not is_pooled(self.conn) and is_large(decided, self.cut, self.large_bytes, self.readers_of):
            return self._announce_large(decided, settings)
        key = (tuple(sorted(settings.items())), None if row.own else row.owner)
        medium = self._media.setdefault(key, InMemory(self.cut.conn, self.statements, settings))
        fetcher = Fetcher(self._readers(decided, settings), decided.at_cut.windows, medium, decided.at_cut.joined)
        decided.job.announce(fetcher)
        return Announced(decided, settings, fetcher)

    def _announce_large(self, decided: Decided, settings: Mapping[str, str]) -> Announced:
        """Announce reads by Spark's executors."""
        from pgtrickle.refresh.compute.large import LargeRefresh

        assert decided.job is not None
        large = LargeRefresh(self.cut.conn, settings, self.statements)
        self.progress.resources.callback(large.release)
        readers = self._readers(decided, settings)
        fetcher = large.fetcher(readers, decided.at_cut.windows, decided.at_cut.joined)
        decided.job.announce(fetcher)
        return Announced(decided, settings, fetcher, large)

    def _readers(self, decided: Decided, settings: Mapping[str, str]) -> dict[str, Reader]:
        row, cut = decided.row, self.cut
        as_owner = None if row.own else sql.Identifier("pgtrickle_views", f"read_{row.pgt_id}")
        if as_owner is not None:
            fence.enter(self.conn)
        here = {f"{SHARDS}{table}": cut.shards[table] for table in row.spread_here}
        home = Reader(self.conn, as_owner, decided.at_cut.compiled.own_code, shards=here)
        return {"": home} | {
            name: Reader(cut.others[name].conn, database=name, settings=settings, shards=_shards_of(decided, name, cut))
            for name in decided.remote.databases
        }

    def read_together(self, announced: Sequence[Announced], *, brokered: bool) -> None:
        """Take from brokers and read once what several stream tables need."""
        if brokered:
            for one in announced:
                self._take_brokered(one)
        self._let_helpers_read(announced)
        self._read_shared_scans(announced)

    def _take_brokered(self, announced: Announced) -> None:
        """Take the changes that brokers have read, and note what they do not offer yet."""
        decided, fetcher = announced.decided, announced.fetcher
        if fetcher is None or announced.large is not None or decided.at_cut.compiled.own_code:
            return
        lacking = {}
        for database in [name for name in decided.remote.databases if not is_node(name)]:
            shared_cut = self.cut.others[database].shared_cut
            names = {
                one.relid: one.stable_name
                for one in decided.sources
                if one.database == database and one.stable_name is not None
            }
            usable = shared_cut if shared_cut is not None and dict(shared_cut.settings) == announced.settings else None
            if wanted := take_brokered(fetcher, database, names, usable):
                lacking[database] = wanted
        if lacking:
            self.wanted.append((announced.settings, lacking))

    def _let_helpers_read(self, announced: Sequence[Announced]) -> None:
        """Let helper processes read large numbers of changes; reading them here would block all other threads."""
        if self.helpers is None or not self._media or self.cut.writes or is_pooled(self.conn):
            return
        sources = [one for table in announced for one in table.decided.sources if one.changed and not one.database]
        many = frozenset(source.relid for source in sources if source.buffered > self.helpers.many)
        if many:
            exported = export(self.cut.conn)
            for medium in self._media.values():
                medium.helpers = HelperRead(self.helpers, exported, many)

    def _read_shared_scans(self, announced: Sequence[Announced]) -> None:
        """Read shared changes once. If that fails, every stream table does its own reading, and fails on its own."""
        for medium in self._media.values():
            fetchers = {
                one.row.pgt_id: one.fetcher
                for one in announced
                if one.fetcher is not None and one.fetcher.medium is medium
            }
            if not fetchers:
                continue
            busy = [one.decided for one in announced if one.row.pgt_id in fetchers]
            try:
                with self._time_limited(busy), self.conn.transaction(force_rollback=True):
                    set_local(self.conn, medium.settings)
                    read_shared_scans(list(fetchers.values()), medium)
            except (psycopg.Error, ResultTooLargeError):
                if self.conn.broken or self.conn.closed:
                    raise

    def _time_limited(self, tables: Sequence[Decided]) -> AbstractContextManager[None]:
        """A time limit for code of the tables' owner, which may not end by itself. All have the same owner."""
        if all(table.row.own for table in tables):
            return nullcontext()
        return fence.read_as_owner(self.conn, [table.row.pgt_id for table in tables])

    def fetch(self, announced: Announced) -> Fetched | None:
        """Read what was announced; None if that takes databases that were not cut.

        If the result turns out to be large, executors read it. If an expression fails for changed rows, AUTO refreshes
        in full: for a delta, expressions are evaluated for all changed rows, even for those where the query would not
        do so.
        """
        decided = announced.decided
        try:
            return self._fetch(announced)
        except psycopg.DataError as error:
            if decided.decision.action is not Action.DIFFERENTIAL or decided.row.refresh_mode != RefreshMode.AUTO:
                raise
            reason = f"an expression fails for changed rows that the query may not reach: {error}"
        whole = self.announce(self.decider.in_full(decided, reason.splitlines()[0]))
        return self._fetch(whole) if whole.is_complete else None

    def _fetch(self, announced: Announced) -> Fetched:
        try:
            return self._read(announced)
        except ResultTooLargeError:
            if is_pooled(self.conn):
                raise
        return self._read(self._announce_large(announced.decided, announced.settings))

    def _read(self, announced: Announced) -> Fetched:
        decided, fetcher = announced.decided, announced.fetcher
        job = decided.job
        if job is None or fetcher is None:
            return Fetched(decided)
        if announced.large is not None:
            with self._suspended_if_terminated(decided):
                rows_in, into_empty = announced.large.fetch(job, fetcher)
            return Fetched(decided, large=announced.large, rows_in=rows_in, into_empty=into_empty)
        medium = fetcher.medium
        assert isinstance(medium, InMemory)
        with (
            self._time_limited([decided]),
            self.conn.transaction(force_rollback=True) if fetcher.missing else nullcontext(),
        ):
            if fetcher.missing:
                set_local(self.conn, announced.settings)
            tables = job.fetch(fetcher)
        parts = {fragment: medium.part_of(table) for fragment, table in tables.items()}
        return Fetched(
            decided,
            tables,
            {fragment: part for fragment, part in parts.items() if part is not None},
            rows_in=sum(table.num_rows for table in tables.values()),
            into_empty=job.stored is not None and tables[job.stored].num_rows == 0,
        )

    @contextmanager
    def _suspended_if_terminated(self, table: Decided) -> Iterator[None]:
        """Suspend the stream table if an executor had to terminate its code."""
        from pgtrickle.spark.executors import WENT_ON

        try:
            yield
        except PgtrickleError as error:
            if WENT_ON in str(error.__cause__):
                fence.suspend(self.conn, [table.row.pgt_id], fence.WENT_ON)
            raise


def _shards_of(decided: Decided, database: str, cut: Cut) -> dict[str, Shards]:
    """A node's shards of the distributed tables that a stream table reads, by their placeholders in its fragments."""
    shards = cut.others[database].shards
    return {
        f"{SHARDS}{source.relid}": shards[source.there]
        for source in decided.remote.sources
        if source.database == database and source.there in shards
    }

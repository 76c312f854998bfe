"""The work of the elected broker in a database: one cut per tick, in which it reads each requested source once.

The broker holds the snapshot for a while, so that consumers can read anything else they need under it.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.catalog.query_files import load_query
from pgtrickle.compile.postgres import CHANGES_SCHEMA
from pgtrickle.errors import PgtrickleError
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.frontier.window import since
from pgtrickle.postgres.copying import copy_out
from pgtrickle.postgres.transactions import READ_SETTINGS, SHARED_LOCK_TIMEOUT, export, limit_cut, set_local
from pgtrickle.sites.remote.connections import Connections, check_catalog, errors_naming
from pgtrickle.sites.shared_cut import WEIGHT, XID, SharedChanges, SharedCut, schema_type

log = logging.getLogger("pgtrickle.broker")

EARLY = 0.9  # ticks between two cuts, at least; less than one, so that the broker does not fall behind its consumers
HELD = 2  # how many of the latest cuts are held
HELD_TICKS = 2.0  # after which a cut is released even if no other followed
LOOK_SECONDS = 0.5  # between checks of the lease and of cuts that are to be released
FORGET_SECONDS = 60.0  # after which the broker leaves a database that is no longer requested
LARGE_BUFFER = 8 << 20  # bytes; in larger buffers, consumers that lag behind have to read for themselves
MOST_COLUMNS = 1000
_PLAIN = re.compile(r"\(+c\d+\)+(::text)?")  # a plain column


@dataclass(frozen=True)
class Wanted:
    """A source whose changes consumers have requested, as registered in its database."""

    stable_name: str
    schema: str
    name: str
    buffer: str
    buffered: int
    expressions: dict[str, list[Any]]
    conditions: list[str]
    settings: dict[str, str]
    homes: list[str]
    snapshots: list[str]  # one per consumer: up to where it has stored what it read
    recent: list[str]  # those of consumers seen recently


@dataclass
class _Held:
    """A cut and the transaction that holds its snapshot."""

    shared_cut: SharedCut
    began: float
    stack: ExitStack


@dataclass
class Publisher:
    """A thread that stands for election in one database and takes cuts there while it is the broker."""

    name: str
    dsn: str
    service_id: uuid.UUID
    address: str
    token: str
    lease_seconds: float
    connections: Connections
    interval: float

    def __post_init__(self) -> None:
        self.node = ""
        self.asked = time.monotonic()
        self.cuts: list[_Held] = []
        self._used: dict[str, int] = {}
        self._outdated: set[str] = set()  # sources whose registered expressions fail
        self._wanted = False
        self._elected_until = 0.0
        self._number = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._refusals = 0
        self._refused_until = 0.0
        self._last = -math.inf  # when the last cut began
        self._thread = threading.Thread(target=self._run, name=f"pgtrickle-broker-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(5.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def shared_cut(self, consumers: Sequence[str], seconds: float) -> SharedCut | None:
        """A cut that none of these consumers has used; None if there is none within `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            refusals = self._refusals
            used = max((self._used.get(consumer, 0) for consumer in consumers), default=0)
            while not self.cuts or self.cuts[-1].shared_cut.number <= used:
                left = deadline - time.monotonic()
                over = self._stopped or self._refusals != refusals or time.monotonic() < self._refused_until
                if over or left <= 0 or self._elected_until < time.monotonic():
                    return None
                self._wanted = True
                self._changed.notify_all()
                self._changed.wait(left)
            shared_cut = self.cuts[-1].shared_cut
            self._used |= dict.fromkeys(consumers, shared_cut.number)
            return shared_cut

    def rows(self, number: int, source: str) -> pa.Table | None:
        """The changes of a source at a cut that is still held."""
        with self._changed:
            shared_cuts = [
                held.shared_cut.sources.get(source) for held in self.cuts if held.shared_cut.number == number
            ]
        return next((brokered.rows for brokered in shared_cuts if brokered is not None), None)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped and time.monotonic() - self.asked < FORGET_SECONDS:
                try:
                    self._round()
                except (psycopg.Error, PgtrickleError) as error:
                    log.info("no shared cut: %s", error, extra={"database": self.name})
                    self._refuse()
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._is_due(), LOOK_SECONDS)
        finally:
            self._refuse()

    def _refuse(self) -> None:
        """End the wait of all consumers: there will be no cut before the next tick."""
        with self._changed:
            self._wanted, self._refused_until = False, time.monotonic() + self.interval
            self._refusals += 1
            self._changed.notify_all()
        self._release(0)

    def _is_due(self) -> bool:
        """Whether a consumer waits for a cut and the last one was nearly a tick ago."""
        return self._wanted and time.monotonic() - self._last >= EARLY * self.interval

    def _round(self) -> None:
        """Renew the election, and take a cut if a consumer waits for one."""
        with self.connections.open(self.name, self.dsn) as conn, errors_naming(self.name):
            if not self._elected(conn):
                self._refuse()
                return
            due = self._is_due()
            wanted = self._wants(conn) if due else []
        if due and not wanted:
            self._refuse()
        elif due:
            held = self._cut(wanted)
            with self._changed:
                self.cuts.append(held)
                self._wanted, self._last = False, held.began
                self._changed.notify_all()
            self._release(HELD)
            self._report(held, wanted)
        elif self.cuts and time.monotonic() - self._last > HELD_TICKS * self.interval:
            self._release(0)

    def _elected(self, conn: psycopg.Connection[Any]) -> bool:
        now = time.monotonic()
        if now < self._elected_until - self.lease_seconds * 2 / 3:
            return True
        if not self.node:
            check_catalog(conn, self.name)
            row = conn.execute("SELECT pgtrickle._database_identity()").fetchone()
            assert row is not None
            self.node = row[0]
        lease = timedelta(seconds=self.lease_seconds)
        row = conn.execute(
            "SELECT pgtrickle._elect_broker(%s, %s, %s, %s)", (self.service_id, self.address, self.token, lease)
        ).fetchone()
        assert row is not None
        elected = bool(row[0] == self.service_id)
        if elected and self._elected_until < now:
            log.info("elected: scans change buffers for all databases", extra={"database": self.name})
        self._elected_until = now + self.lease_seconds if elected else 0.0
        return elected

    @staticmethod
    def _wants(conn: psycopg.Connection[Any]) -> list[Wanted]:
        with conn.cursor(row_factory=dict_row) as cursor:
            return [Wanted(**row) for row in cursor.execute(load_query("broker_wants"))]

    def _cut(self, wanted: Sequence[Wanted]) -> _Held:
        """Lock the sources, take the snapshot and read the changes; the transaction stays open."""
        began = time.monotonic()
        with ExitStack() as stack:
            conn = stack.enter_context(self.connections.open(self.name, self.dsn))
            with errors_naming(self.name):
                # Lock every table that consumers read here, not only the requested ones: they also do lookups under
                # this snapshot.
                tables = conn.execute(load_query("broker_locks")).fetchall()
                conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                stack.callback(conn.execute, "ROLLBACK")
                limit_cut(conn, SHARED_LOCK_TIMEOUT)
                names = sql.SQL(", ").join(sql.Identifier(schema, name) for _, schema, name in tables)
                conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(names))
                exported = export(conn)
                # A name may belong to another table now.
                now = conn.execute(load_query("broker_locks")).fetchall()
                locked = frozenset(row[0] for row in now if row in tables)
            sources = self._read(exported, wanted)
            self._number += 1
            shared_cut = SharedCut(self._number, self.node, exported, locked, wanted[0].settings, sources)
            return _Held(shared_cut, began, stack.pop_all())

    def _read(self, exported: str, wanted: Sequence[Wanted]) -> dict[str, SharedChanges]:
        """The changes of each source in that snapshot.

        A separate transaction reads them, because buffers must not be locked for as long as the snapshot is held.
        """
        sources: dict[str, SharedChanges] = {}
        with self.connections.open(self.name, self.dsn) as conn, errors_naming(self.name):
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            try:
                conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(exported)))
                set_local(conn, READ_SETTINGS)
                _be_service(conn)
                for one in wanted:
                    base = _base(one)
                    if base is None or one.settings != wanted[0].settings:
                        continue
                    try:
                        with conn.transaction():
                            sources[one.stable_name] = SharedChanges(base, *_read(conn, one, base))
                    except (psycopg.ProgrammingError, pa.ArrowException) as error:
                        # An expression over a column that was dropped or has another type now. It is removed from the
                        # registry; consumers that still need it register it again.
                        log.info("not read: %s", error, extra={"source": f"{one.schema}.{one.name}"})
                        self._outdated.add(one.stable_name)
            finally:
                if not conn.closed:
                    conn.execute("ROLLBACK")
            outdated, self._outdated = sorted(self._outdated), set()
            if outdated:
                conn.execute(
                    "UPDATE pgtrickle.pgt_broker_entries SET expressions = '{}', conditions = '[]'"
                    " WHERE source_stable_name = ANY (%s)",
                    (outdated,),
                )
        return sources

    def _report(self, held: _Held, wanted: Sequence[Wanted]) -> None:
        """Record what the scan found, for broker_status()."""
        found: dict[str, list[Any]] = {"homes": [], "names": [], "pending": [], "bounds": []}
        for one in wanted:
            brokered = held.shared_cut.sources.get(one.stable_name)
            for home in one.homes if brokered is not None else ():
                assert brokered is not None
                windows = _windows(text for text in one.snapshots if text.startswith(f"{home}/"))
                served = [window for window in windows if brokered.serves(window)]
                found["homes"].append(home)
                found["names"].append(one.stable_name)
                found["pending"].append(max((brokered.changed(window) for window in served), default=None))
                found["bounds"].append(pc.max(brokered.rows.column(XID)).as_py())
        with self.connections.open(self.name, self.dsn) as conn, errors_naming(self.name):
            conn.execute(load_query("broker_found"), found | {"service": self.service_id})

    def _release(self, keep: int) -> None:
        """Release all cuts but the last `keep` ones."""
        with self._changed:
            over, self.cuts = self.cuts[: len(self.cuts) - keep], self.cuts[len(self.cuts) - keep :] if keep else []
        for held in over:
            try:
                held.stack.close()
            except psycopg.Error as error:
                log.info("a cut ended unexpectedly: %s", error, extra={"database": self.name})


def _be_service(conn: psycopg.Connection[Any]) -> None:
    """Give up superuser rights: the service role can write the registry, so its entries must not run with more."""
    row = conn.execute(
        "SELECT pgtrickle._service_role() FROM pg_roles WHERE rolname = current_user AND rolsuper"
    ).fetchone()
    if row is not None and row[0] is not None:
        conn.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(row[0])))


def _windows(texts: Iterable[str]) -> list[Snapshot]:
    return [Snapshot.parse(text.partition(" ")[2]) for text in texts]


def _base(one: Wanted) -> Snapshot | None:
    """The snapshot up to which all consumers have stored the changes; None if no consumer has stored any.

    In a large buffer, only consumers that were seen recently count.
    """
    windows = _windows(one.recent if one.buffered > LARGE_BUFFER else one.snapshots)
    if not windows:
        return None
    xmax = min(window.xmax for window in windows)
    running = sorted({xid for window in windows for xid in window.in_progress if xid < xmax})
    return Snapshot(min([xmax, *running]), xmax, tuple(running))


def _read(conn: psycopg.Connection[Any], one: Wanted, base: Snapshot) -> tuple[dict[str, str], pa.Table]:
    """The changes after the base: all requested expressions, or only the plain columns if an expression fails."""
    try:
        with conn.transaction():
            set_local(conn, one.settings)
            texts = dict(list(one.expressions.items())[:MOST_COLUMNS])
            return _copy(conn, one, base, texts, one.conditions[: MOST_COLUMNS // 2])
    except psycopg.DataError as error:
        log.info("read without expressions: %s", error, extra={"source": f"{one.schema}.{one.name}"})
    with conn.transaction():
        set_local(conn, one.settings)
        plain = {text: type_ for text, type_ in one.expressions.items() if _PLAIN.fullmatch(text)}
        return _copy(conn, one, base, plain, [])


def _copy(
    conn: psycopg.Connection[Any],
    one: Wanted,
    base: Snapshot,
    expressions: Mapping[str, Sequence[Any]],
    conditions: Sequence[str],
) -> tuple[dict[str, str], pa.Table]:
    columns = {text: f"x{i}" for i, text in enumerate(expressions)}
    flags = {text: f"f{i}" for i, text in enumerate(conditions)}
    # The expressions are written by pgtrickle's compiler and stored where only the service role can write.
    items = [sql.SQL(f"{text} AS {name}") for text, name in columns.items()]
    items += [sql.SQL(f"coalesce({text}, false) AS {name}") for text, name in flags.items()]
    items += [sql.SQL(f"__pgt_xid AS {XID}"), sql.SQL(f"__pgt_w::bigint AS {WEIGHT}")]
    statement = sql.SQL("SELECT {} FROM {} WHERE {}").format(
        sql.SQL(", ").join(items), sql.Identifier(CHANGES_SCHEMA, one.buffer), since(base, "__pgt_xid")
    )
    schema = pa.schema(
        [(columns[text], schema_type(*type_)) for text, type_ in expressions.items()]
        + [(name, pa.bool_()) for name in flags.values()]
        + [(XID, pa.int64()), (WEIGHT, pa.int64())]
    )
    return columns | flags, copy_out(conn, statement, schema)

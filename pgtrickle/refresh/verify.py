"""Comparing a stream table with its query in one snapshot.

The stream table is refreshed in a transaction that stays open. Its snapshot shows the sources as the refresh read them,
and the table as the refresh wrote it. PostgreSQL computes one digest for each side, the sum of the hashes of its rows;
individual rows are compared only if the digests differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.enums import Storage
from pgtrickle.errors import PrivilegeError
from pgtrickle.frontier.frontier import Frontier
from pgtrickle.postgres import fence
from pgtrickle.postgres.connection import is_pooled
from pgtrickle.postgres.transactions import set_local
from pgtrickle.query.nondeterminism import nondeterministic_part
from pgtrickle.refresh.engine import Engine
from pgtrickle.refresh.failures import LONGEST_MESSAGE
from pgtrickle.refresh.fetch.fetch_stage import TRANSPORT
from pgtrickle.refresh.stages import Computed

ATTEMPTS = 5
EXAMPLES = 10  # rows shown of each kind
COMPARED = 1000  # rows of each kind among which rows with nearly equal floats are paired; fewer of wide tables
COMPARED_CHARACTERS = 64_000_000  # in the rows of each kind
LONGEST_VALUE = 1000  # characters of a value; a hash stands for the rest
# The last digits of a sum of floats depend on the order of the additions, in PostgreSQL too.
FLOAT_TOLERANCE = 1e-9
FLOATS = frozenset({"real", "double precision"})

Row = tuple[str | None, ...]


@dataclass(frozen=True)
class Verification:
    """The result of comparing a stream table with its query."""

    pgt_id: int
    name: str
    equal: bool | None  # None if they could not be compared
    reason: str | None  # why they could not be compared
    rows: int = 0
    missing: int = 0  # rows of the query that the stream table lacks
    unexpected: int = 0  # rows of the stream table that the query does not give
    columns: tuple[str, ...] = ()
    missing_rows: tuple[Row, ...] = ()  # the first of them, as PostgreSQL prints them
    unexpected_rows: tuple[Row, ...] = ()
    query_seconds: float = 0.0  # for running the query and computing its digest
    table_seconds: float = 0.0  # for reading the table and computing its digest
    failed: bool = False  # not compared because it could not be refreshed

    @property
    def problem(self) -> str | None:
        """The message if the stream table is not known to be equal to its query, else None."""
        if self.equal is False:
            return f"it differs from its query: {self.missing} missing and {self.unexpected} unexpected rows"
        return f"it was not compared: {self.reason}" if self.equal is None else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(engine: Engine, pgt_id: int) -> Verification:
    """Refresh the stream table and compare it with its query."""
    row = engine.row(pgt_id)
    may_refresh = engine.conn.execute("SELECT has_table_privilege('pgtrickle.pgt_stream_tables', 'UPDATE')").fetchone()
    if may_refresh != (True,):
        raise PrivilegeError(
            f"role {engine.conn.info.user} may not verify {row.label}: that takes a refresh",
            "Let the role do it that installed the catalog, or the one that the service runs as.",
        )
    reason = _cannot_compare(engine.conn, row)
    if reason is not None:
        return Verification(pgt_id, row.label, None, reason)
    found: list[Verification] = []

    def compare(computed: Computed) -> None:
        found[:] = [_compare(engine.conn, computed)]

    for _ in range(ATTEMPTS):
        # A large change, for example, cannot be refreshed in one transaction. It is refreshed in several, after which
        # little is left for the next attempt.
        outcome = engine.attempt([pgt_id], "MANUAL", atomic=True, before_commit=compare)
        for error in outcome.problems.values():
            reason = f"it could not be refreshed: {error}".splitlines()[0]
            return Verification(pgt_id, row.label, None, reason, failed=True)
        if found and outcome.results and outcome.atomic:  # else the transaction of the comparison was rolled back
            return found[0]
    reason = "what it reads was altered or changed too much meanwhile; try again when less is written to its sources"
    return Verification(pgt_id, row.label, None, reason, failed=True)


def answer_requests(engine: Engine, pgt_id: int) -> Verification:
    """Compare a stream table for requests that were made in SQL, and store the answer in them."""
    conn = engine.conn
    asked = conn.execute(
        "SELECT request_id FROM pgtrickle.pgt_requests WHERE pgt_id = %s AND kind = 'VERIFY' AND status = 'PENDING'",
        (pgt_id,),
    ).fetchall()

    def answer(problem: str | None) -> None:
        conn.execute(
            "UPDATE pgtrickle.pgt_requests SET status = %s, error = %s, finished_at = clock_timestamp()"
            " WHERE request_id = ANY (%s) AND status = 'PENDING'",
            ("DONE" if problem is None else "FAILED", problem, [request for (request,) in asked]),
        )

    try:
        found = verify(engine, pgt_id)
    except Exception as error:
        if not conn.broken and not conn.closed:
            answer(f"it was not compared: {error}"[:LONGEST_MESSAGE])
        raise
    answer(found.problem)
    return found


def _cannot_compare(conn: psycopg.Connection[Any], row: StreamTableRow) -> str | None:
    if row.on_nodes or row.st_placement != Storage.LOCAL:
        return "it reads or is a table that Citus distributes"
    if row.databases:
        return f"it reads other databases ({', '.join(row.databases)}), and no query of this one gives its rows"
    if row.pooler_compatibility_mode or is_pooled(conn):
        return "the connection goes through a pooler in transaction mode; connect to the server itself"
    return None


def _compare(conn: psycopg.Connection[Any], computed: Computed) -> Verification:
    """Compare in the transaction that refreshed the stream table, and record the result there."""
    row = computed.row
    columns = _columns(conn, row)
    names = tuple(columns)
    table = sql.Identifier(row.pgt_schema, row.pgt_name)
    view = sql.Identifier("pgtrickle_views", f"q_{row.pgt_id}")
    differing: dict[str, tuple[int, list[Row]]] = {}
    with fence.read_as_owner(conn, [row.pgt_id]), conn.transaction(force_rollback=True):
        set_local(conn, TRANSPORT | row.query_settings)
        started = time.monotonic()
        wanted = _digest(conn, row, view, names)
        query_seconds = time.monotonic() - started
        started = time.monotonic()
        stored = _digest(conn, row, table, names)
        table_seconds = time.monotonic() - started
        if wanted != stored:
            differing = _differing(conn, row, view, table, columns)
    part = _nondeterministic_part(conn, row) if differing else None
    if part is not None:
        return Verification(row.pgt_id, row.label, None, f"it differs, but its query leaves the result open: {part}")
    missing, missing_rows = differing.get("missing", (0, []))
    unexpected, unexpected_rows = differing.get("unexpected", (0, []))
    result = Verification(
        row.pgt_id,
        row.label,
        not missing and not unexpected,
        None,
        stored[0],
        missing,
        unexpected,
        names,
        tuple(missing_rows[:EXAMPLES]),
        tuple(unexpected_rows[:EXAMPLES]),
        round(query_seconds, 6),
        round(table_seconds, 6),
    )
    _record(conn, computed.frontier, result)
    return result


def _nondeterministic_part(conn: psycopg.Connection[Any], row: StreamTableRow) -> str | None:
    views = "SELECT pg_catalog.pg_get_viewdef(r.relation) FROM pgtrickle._view_rules(%s::oid::regclass) AS r"
    found = (nondeterministic_part(definition) for (definition,) in conn.execute(views, (row.view_relid,)))
    return next((part for part in found if part is not None), None)


def _columns(conn: psycopg.Connection[Any], row: StreamTableRow) -> dict[str, str]:
    """The user-visible columns with their types."""
    found = conn.execute(
        "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute WHERE attrelid = %s AND attnum > 0"
        " AND NOT attisdropped AND NOT starts_with(attname, '__pgt_') ORDER BY attnum",
        (row.relid,),
    ).fetchall()
    return dict(found)


def _digest(
    conn: psycopg.Connection[Any], row: StreamTableRow, relation: sql.Identifier, names: Sequence[str]
) -> tuple[int, str]:
    """The number of rows and the sum of their hashes."""
    statement = sql.SQL(
        "SELECT pg_catalog.count(*), coalesce(pg_catalog.sum(pg_catalog.hashtextextended(ROW({})::pg_catalog.text, 0)), 0)"
        "::pg_catalog.text FROM {}"
    ).format(_list(names), relation)
    ((count, total),) = _run_as_owner(conn, row, statement, "rows pg_catalog.int8, digest pg_catalog.text")
    return count, total


def _differing(
    conn: psycopg.Connection[Any],
    row: StreamTableRow,
    view: sql.Identifier,
    table: sql.Identifier,
    columns: dict[str, str],
) -> dict[str, tuple[int, list[Row]]]:
    """For each side, how many rows the other lacks, and the first of them; equality is PostgreSQL's."""
    try:
        with conn.transaction():
            found = _subtract(conn, row, view, table, dict.fromkeys(columns, ""))
    except psycopg.errors.UndefinedFunction:  # json, xml and point can only be compared as text
        found = _subtract(conn, row, view, table, _texts(conn, row))
    floats = [index for index, type_ in enumerate(columns.values()) if type_ in FLOATS]
    kinds = {
        kind: (int(count), [tuple(values) for other, _, values in found if other == kind]) for kind, count, _ in found
    }
    return _without_close_rows(kinds, floats) if floats else kinds


def _texts(conn: psycopg.Connection[Any], row: StreamTableRow) -> dict[str, str]:
    """For each column the cast that makes it comparable; empty if its type is comparable."""
    found = conn.execute(
        "SELECT a.attname, EXISTS (SELECT FROM pg_opclass AS o JOIN pg_am AS m ON m.oid = o.opcmethod AND m.amname = 'btree'"
        " WHERE o.opcdefault AND o.opcintype = coalesce(nullif(t.typbasetype, 0), t.oid)) FROM pg_attribute AS a"
        " JOIN pg_type AS t ON t.oid = a.atttypid WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped",
        (row.relid,),
    ).fetchall()
    return {name: "" if comparable else "::pg_catalog.text" for name, comparable in found if name[:6] != "__pgt_"}


def _subtract(
    conn: psycopg.Connection[Any],
    row: StreamTableRow,
    view: sql.Identifier,
    table: sql.Identifier,
    casts: dict[str, str],
) -> list[tuple[str, int, list[str | None]]]:
    items = sql.SQL(", ").join(
        sql.SQL("{0}{1} AS {0}").format(sql.Identifier(name), sql.SQL(cast)) for name, cast in casts.items()
    )
    shown = sql.SQL(
        "(SELECT CASE WHEN length(t) <= {longest} THEN t ELSE concat(pg_catalog.left(t, {longest}), '... (sha256 ',"
        " encode(sha256(convert_to(t, 'UTF8')), 'hex'), ')') END FROM (SELECT {column}::pg_catalog.text AS t OFFSET 0) AS v)"
    )
    texts = sql.SQL(", ").join(shown.format(longest=LONGEST_VALUE, column=sql.Identifier(name)) for name in casts)
    most = max(EXAMPLES, min(COMPARED, COMPARED_CHARACTERS // (LONGEST_VALUE * max(1, len(casts)))))
    side = sql.SQL(
        "(SELECT {kind}::pg_catalog.text, (SELECT pg_catalog.count(*) FROM {rows}), ARRAY[{texts}] FROM {rows} LIMIT {limit})"
    )
    statement = sql.SQL(
        "WITH v AS MATERIALIZED (SELECT {items} FROM {view}), s AS MATERIALIZED (SELECT {items} FROM {table}),"
        " m AS MATERIALIZED (SELECT * FROM v EXCEPT ALL SELECT * FROM s),"
        " u AS MATERIALIZED (SELECT * FROM s EXCEPT ALL SELECT * FROM v) {missing} UNION ALL {unexpected}"
    ).format(
        items=items,
        view=view,
        table=table,
        missing=side.format(kind="missing", rows=sql.Identifier("m"), texts=texts, limit=most),
        unexpected=side.format(kind="unexpected", rows=sql.Identifier("u"), texts=texts, limit=most),
    )
    columns = "kind pg_catalog.text, n pg_catalog.int8, line pg_catalog.text[]"
    return _run_as_owner(conn, row, statement, columns)


def _without_close_rows(
    kinds: dict[str, tuple[int, list[Row]]], floats: Sequence[int]
) -> dict[str, tuple[int, list[Row]]]:
    """The differences without pairs of rows that differ only in the last digits of floats."""
    missing, unexpected = (list(kinds.get(kind, (0, []))[1]) for kind in ("missing", "unexpected"))
    for row in list(missing):
        partner = next((other for other in unexpected if _is_close(row, other, floats)), None)
        if partner is not None:
            missing.remove(row)
            unexpected.remove(partner)
    left = {"missing": missing, "unexpected": unexpected}
    return {kind: (count - len(rows) + len(left[kind]), left[kind]) for kind, (count, rows) in kinds.items()}


def _is_close(row: Row, other: Row, floats: Sequence[int]) -> bool:
    for index, (left, right) in enumerate(zip(row, other, strict=True)):
        if left == right:
            continue
        if index not in floats or left is None or right is None:
            return False
        if not math.isclose(float(left), float(right), rel_tol=FLOAT_TOLERANCE):
            return False
    return True


def _list(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)


def _run_as_owner(
    conn: psycopg.Connection[Any], row: StreamTableRow, statement: sql.Composed, columns: str
) -> list[tuple[Any, ...]]:
    """Run a query with the rights of the stream table's owner, and return its rows."""
    if row.own:
        return conn.execute(statement).fetchall()
    fence.enter(conn)
    call = sql.SQL("SELECT * FROM {}({}::pg_catalog.text, ARRAY[]::pg_catalog.text[]) AS t({})").format(
        sql.Identifier("pgtrickle_views", f"read_{row.pgt_id}"),
        sql.Literal(statement.as_string(conn)),
        sql.SQL(columns),
    )
    return conn.execute(call).fetchall()


def _record(conn: psycopg.Connection[Any], frontier: Frontier, result: Verification) -> None:
    conn.execute(
        "INSERT INTO pgtrickle.pgt_verifications (pgt_id, equal, row_count, missing, unexpected, query_seconds,"
        " table_seconds, frontier) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
        (
            result.pgt_id,
            result.equal,
            result.rows,
            result.missing,
            result.unexpected,
            result.query_seconds,
            result.table_seconds,
            Jsonb(frontier.to_json()),
        ),
    )
    if not result.equal:
        details = {"missing": result.missing, "unexpected": result.unexpected}
        conn.execute("SELECT pgtrickle._emit_event('verification_failed', %s, %s)", (result.pgt_id, Jsonb(details)))

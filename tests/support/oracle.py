"""The oracle: a stream table must contain exactly the rows that PostgreSQL returns for its query."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

Row = tuple[str | None, ...]

_FLOAT_OIDS = frozenset({700, 701})
# In PostgreSQL too, the last digits of a float sum depend on the order of the rows.
_FLOAT_TOLERANCE = 1e-9
_SHOWN = 10


@dataclass(frozen=True)
class _Result:
    names: tuple[str, ...]
    types: tuple[int, ...]
    rows: Counter[Row]


def fetch_multiset(conn: psycopg.Connection[Any], query: str) -> Counter[Row]:
    """The rows of a query with their multiplicities; values are text as PostgreSQL prints it."""
    return _fetch(conn, _trusted(query)).rows


def assert_equal_to_query(
    conn: psycopg.Connection[Any], stream_table: str, query: str, by_value: Collection[str] = ()
) -> None:
    """Assert that the stream table's user columns and the query have the same multiset of rows in one snapshot.

    Values are compared as text, columns in `by_value` with PostgreSQL's `=`, and floats with a relative tolerance. If
    the connection is in a REPEATABLE READ transaction, the snapshot of that transaction is used.
    """
    defining = sql.SQL("SELECT * FROM (\n{}\n) AS defining").format(_trusted(query.strip().rstrip(";")))
    with _one_snapshot(conn):
        stored = _user_columns(conn, stream_table)
        actual = _fetch(conn, stored)
        expected = _fetch(conn, defining)
        _assert_same_columns(stream_table, query, actual, expected)
        if unknown := set(by_value) - set(actual.names):
            raise ValueError(f"{stream_table} has no column {sorted(unknown)} to compare by value")
        classes = {
            index: _equal_values(
                conn, stream_table, name, actual.types[index], {row[index] for row in [*actual.rows, *expected.rows]}
            )
            for index, name in enumerate(actual.names)
            if name in by_value
        }
    missing = _canonical(expected.rows, classes)
    unexpected = _canonical(actual.rows, classes)
    missing, unexpected = missing - unexpected, unexpected - missing
    _drop_close_rows(missing, unexpected, [i for i, oid in enumerate(actual.types) if oid in _FLOAT_OIDS])
    if missing or unexpected:
        raise AssertionError(
            f"{stream_table} differs from its query\n"
            f"columns: {', '.join(actual.names)}\n"
            f"{_show('missing', missing)}\n{_show('unexpected', unexpected)}\nquery:\n{query}"
        )


@contextmanager
def _one_snapshot(conn: psycopg.Connection[Any]) -> Iterator[None]:
    if conn.info.transaction_status == TransactionStatus.INTRANS:
        isolation = _fetch(conn, sql.SQL("SHOW transaction_isolation")).rows
        if not {("repeatable read",), ("serializable",)} & set(isolation):
            raise ValueError("the oracle needs one snapshot: use an idle connection or a REPEATABLE READ transaction")
        yield
        return
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def _trusted(query: str) -> sql.SQL:
    # psycopg's SQL class is meant for literals; the text of a test's own query is as trustworthy.
    return sql.SQL(query)


def _fetch(conn: psycopg.Connection[Any], query: sql.Composable) -> _Result:
    with psycopg.ClientCursor(conn) as cur:
        cur.execute(query.as_bytes(conn))
        result = cur.pgresult
        assert result is not None
        columns = range(result.nfields)
        rows = Counter(
            tuple(_text(result.get_value(row, column)) for column in columns) for row in range(result.ntuples)
        )
        names = tuple((result.fname(column) or b"").decode() for column in columns)
        return _Result(names, tuple(result.ftype(column) for column in columns), rows)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _user_columns(conn: psycopg.Connection[Any], stream_table: str) -> sql.Composed:
    rows = conn.execute(
        """
        SELECT n.nspname, c.relname, a.attname
        FROM pg_class c
        JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        WHERE c.oid = %s::text::regclass AND NOT starts_with(a.attname, '__pgt_')
        ORDER BY a.attnum
        """,
        [stream_table],
    ).fetchall()
    if not rows:
        raise AssertionError(f"{stream_table} has no user columns")
    columns = sql.SQL(", ").join(sql.Identifier(column) for _, _, column in rows)
    return sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(rows[0][0], rows[0][1]))


def _assert_same_columns(stream_table: str, query: str, actual: _Result, expected: _Result) -> None:
    if (actual.names, actual.types) != (expected.names, expected.types):
        stored, given = (list(zip(side.names, side.types, strict=True)) for side in (actual, expected))
        raise AssertionError(
            f"{stream_table} has columns {stored}, its query gives {given} (name, type oid)\nquery:\n{query}"
        )


def _equal_values(
    conn: psycopg.Connection[Any], stream_table: str, column: str, type_oid: int, texts: set[str | None]
) -> dict[str | None, str | None]:
    """Map every text to the first of those that are equal by PostgreSQL's `=` under the column's collation.

    It works on the fetched texts, because running the query again may give another text for the same group.
    """
    type_name = _fetch(conn, sql.SQL("SELECT format_type({}, NULL)").format(sql.Literal(type_oid))).rows
    ((name,),) = type_name
    row = conn.execute(
        "SELECT n.nspname, l.collname FROM pg_attribute AS a JOIN pg_collation AS l ON l.oid = a.attcollation"
        " JOIN pg_namespace AS n ON n.oid = l.collnamespace WHERE a.attrelid = %s::text::regclass AND a.attname = %s",
        (stream_table, column),
    ).fetchone()
    collate = sql.SQL(" COLLATE {}").format(sql.Identifier(*row)) if row is not None else sql.SQL("")
    query = sql.SQL("SELECT dense_rank() OVER (ORDER BY value::{}{}), value FROM unnest({}::text[]) AS value").format(
        _trusted(name or ""), collate, sql.Literal(list(texts))
    )
    by_rank: dict[str | None, list[str | None]] = defaultdict(list)
    for rank, value in _fetch(conn, query).rows:
        by_rank[rank].append(value)
    return {value: min(values, key=lambda text: text or "") for values in by_rank.values() for value in values}


def _canonical(rows: Counter[Row], classes: dict[int, dict[str | None, str | None]]) -> Counter[Row]:
    if not classes:
        return rows
    canonical: Counter[Row] = Counter()
    for row, count in rows.items():
        canonical[tuple(classes[i][v] if i in classes else v for i, v in enumerate(row))] += count
    return canonical


def _drop_close_rows(missing: Counter[Row], unexpected: Counter[Row], floats: Sequence[int]) -> None:
    """Remove pairs of rows that differ only in floats and only within the tolerance."""
    if not floats:
        return
    candidates: dict[Row, list[Row]] = defaultdict(list)
    for row in unexpected:
        candidates[_without(row, floats)].append(row)
    for row in list(missing):
        for other in candidates[_without(row, floats)]:
            if all(_close(row[i], other[i]) for i in floats):
                paired = min(missing[row], unexpected[other])
                missing[row] -= paired
                unexpected[other] -= paired
    for rows in (missing, unexpected):
        for row in [row for row, count in rows.items() if count == 0]:
            del rows[row]


def _without(row: Row, indexes: Sequence[int]) -> Row:
    return tuple(value for i, value in enumerate(row) if i not in indexes)


def _close(left: str | None, right: str | None) -> bool:
    if left is None or right is None:
        return left is right
    a, b = float(left), float(right)
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=_FLOAT_TOLERANCE)


def _show(title: str, rows: Counter[Row]) -> str:
    shown = [f"  {row} x{count}" for row, count in sorted(rows.items(), key=repr)[:_SHOWN]]
    return "\n".join([f"{title} ({rows.total()} rows):", *shown])

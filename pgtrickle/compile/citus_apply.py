"""The statements that apply a delta to a table that Citus placed on other nodes.

A single statement is not possible there: each change of such a table must be a statement of its own. The delta is in a
temporary table, with its weights and row ids (compile.apply). Rows are identified by `__pgt_row_id`: a hash of the key,
or of the whole row.
"""

from __future__ import annotations

from pgtrickle.compile.apply import ROW_ID, Target
from pgtrickle.compile.sql_text import ident
from pgtrickle.query.plan import Column


def citus_key(
    columns: tuple[Column, ...], key: tuple[str, ...] | None, distribution_column: str | None
) -> tuple[str, ...] | None:
    """The key that identifies rows; None unless equal keys have equal hashes and a row never changes its shard."""
    if key is None or (distribution_column is not None and distribution_column not in key):
        return None
    keys = [column for column in columns if column.name in key]
    return key if all(column.type.has_key for column in keys) else None


def stage_ddl(stage: str, target: Target) -> str:
    """DDL for the temporary table, which exists as long as the connection."""
    columns = ", ".join(f"{target.staged(column)} {column.type.declaration}" for column in target.columns)
    return f"CREATE TEMP TABLE IF NOT EXISTS {stage} (w bigint, row_id uuid, {columns}) ON COMMIT DELETE ROWS"


def citus_statements(target: Target, distribution_column: str | None) -> list[str]:
    """The statements, in order. Each returns counts in an array: rows inserted, deleted, and not found for deletion."""
    assert target.stage is not None
    names = ", ".join([*(ident(column.name) for column in target.columns), ROW_ID])
    values = ", ".join([f"z.{target.staged(column)}" for column in target.columns] + ["z.row_id"])
    if target.key is not None:
        return _by_key(target, names, values, distribution_column)
    return _by_row(target, names, values)


def _mark(stage: str, gone: str, counted: str) -> str:
    """A statement that adds the row ids to delete to the stage, as rows without a weight.

    Citus accepts no more than a condition in the subquery that looks them up there.
    """
    return (
        f"WITH g AS (INSERT INTO {stage} (row_id) {gone} RETURNING 1)"
        f" SELECT ARRAY[0, 0, {counted}] FROM (SELECT count(*) AS n FROM g) AS c"
    )


def _by_key(target: Target, names: str, values: str, distribution_column: str | None) -> list[str]:
    assert target.stage is not None
    gone = f"SELECT row_id FROM {target.stage} GROUP BY row_id HAVING NOT bool_or(w > 0)"
    others = [c.name for c in target.columns if c.name not in (target.key or ()) and c.name != distribution_column]
    sets = ", ".join(f"{ident(name)} = excluded.{ident(name)}" for name in others)
    action = f"UPDATE SET {sets}" if sets else "NOTHING"
    conflict = ", ".join([*([ident(distribution_column)] if distribution_column is not None else []), ROW_ID])
    return [
        _mark(target.stage, gone, "c.n"),
        f"WITH d AS (DELETE FROM {target.table} WHERE {ROW_ID} IN {_marked(target.stage)} RETURNING 1)"
        " SELECT ARRAY[0, count(*), -count(*)] FROM d",
        f"WITH i AS (INSERT INTO {target.table} ({names}) SELECT {values} FROM {target.stage} AS z WHERE z.w > 0"
        f" ON CONFLICT ({conflict}) DO {action} RETURNING 1) SELECT ARRAY[count(*), 0, 0] FROM i",
    ]


def _marked(stage: str) -> str:
    return f"(SELECT row_id FROM {stage} WHERE w IS NULL)"


def _by_row(target: Target, names: str, values: str) -> list[str]:
    """Delete all copies of a row that loses some, and insert the remaining ones again: copies are indistinguishable."""
    assert target.stage is not None
    net = f"SELECT row_id, sum(w)::bigint AS w FROM {target.stage} WHERE w <> 0 GROUP BY row_id HAVING sum(w) <> 0"
    # The copies that the table has now, in the stage as rows without values and with weight 0.
    there = f"SELECT row_id, count(*) AS n FROM {target.stage} WHERE w = 0 GROUP BY row_id"
    found = f"({net}) AS n LEFT JOIN ({there}) AS t USING (row_id)"
    one = f"SELECT DISTINCT ON (row_id) * FROM {target.stage} WHERE w <> 0 ORDER BY row_id"
    return [
        _mark(target.stage, f"SELECT row_id FROM ({net}) AS n WHERE w < 0", "0"),
        f"WITH h AS (INSERT INTO {target.stage} (w, row_id) SELECT 0, {ROW_ID} FROM {target.table}"
        f" WHERE {ROW_ID} IN {_marked(target.stage)} RETURNING 1)"
        " SELECT ARRAY[0, 0, 0] FROM (SELECT count(*) FROM h) AS c",
        "SELECT ARRAY[0, coalesce(sum(least(-n.w, coalesce(t.n, 0))), 0),"
        f" coalesce(sum(greatest(-n.w - coalesce(t.n, 0), 0)), 0)]::bigint[] FROM {found} WHERE n.w < 0",
        f"WITH d AS (DELETE FROM {target.table} WHERE {ROW_ID} IN {_marked(target.stage)} RETURNING 1)"
        " SELECT ARRAY[0, 0, 0] FROM (SELECT count(*) FROM d) AS c",
        f"WITH c AS (SELECT row_id, n.w, n.w + coalesce(t.n, 0) AS copies FROM {found}),"
        f" i AS (INSERT INTO {target.table} ({names}) SELECT {values} FROM ({one}) AS z JOIN c USING (row_id),"
        " generate_series(1, c.copies) RETURNING 1)"
        " SELECT ARRAY[(SELECT coalesce(sum(w), 0)::bigint FROM c WHERE w > 0), 0, 0] FROM (SELECT count(*) FROM i) AS n",
    ]

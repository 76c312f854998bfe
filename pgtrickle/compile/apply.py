"""The single statement that applies a delta to the stream table in one pass.

A delta arrives as text columns, either as arrays in the statement's parameter or in a relation. It becomes `z`: rows of
the stream table with weights. With a key, new rows are inserted or replace their predecessors, and keys left without a
row are deleted. Without a key, rows are identified by `__pgt_row_id`, a hash of what they print, and as many copies are
inserted or deleted as the weight says. The statement returns the numbers of rows inserted, of rows deleted, and of
deletions that found no row; the last shows that something else changed the stream table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pgtrickle.compile.postgres import expression_sql, form_sql
from pgtrickle.compile.sql_text import ident
from pgtrickle.ivm.additive import AdditiveForm
from pgtrickle.ivm.program import Step
from pgtrickle.query.plan import Column, Filter
from pgtrickle.query.types import PgType

ROW_ID = "__pgt_row_id"


@dataclass(frozen=True)
class Target:
    """The stream table's storage."""

    table: str  # quoted, with schema
    columns: tuple[Column, ...]
    key: tuple[str, ...] | None
    null_keys: bool = True  # the delta may have NULL in a key, which cannot be looked up in an index
    empty: bool = False  # nothing is stored, so there is nothing to delete and no conflict
    # For a table that Citus placed: z is written to this table, and other statements apply it.
    stage: str | None = None
    former_row_ids: bool = False  # see pgtrickle._former_row_id()

    @property
    def has_row_id(self) -> bool:
        return self.key is None or self.stage is not None

    def staged(self, column: Column) -> str:
        """A column's name in the stage. The stage outlives a plan, so this is not the plan's id."""
        return f"v{sorted(one.name for one in self.columns).index(column.name)}"


def incoming(columns: Sequence[tuple[str, PgType]], relation: str | None) -> str:
    """SQL for the delta as a relation of typed columns, with its weight first."""
    names = [name for name, _ in columns]
    typed = ["w::bigint AS w", *(f"{type_.from_text(ident(name))} AS {ident(name)}" for name, type_ in columns)]
    if relation is not None:
        return f"SELECT {', '.join(typed)} FROM {relation}"
    arrays = ", ".join(f"($1::text[])[{i + 1}]::text[]" for i in range(len(names) + 1))
    return f"SELECT {', '.join(typed)} FROM unnest({arrays}) AS u({', '.join(['w', *map(ident, names)])})"


def finished(rows: str, steps: Sequence[Step]) -> str:
    """SQL for rows with weights after the finish steps."""
    for step in steps:
        if isinstance(step, Filter):
            rows = f"SELECT * FROM ({rows}) AS f WHERE {expression_sql(step.condition)}"
        else:
            items = [f"{expression_sql(value)} AS {ident(column.id)}" for column, value in step.items]
            rows = f"SELECT {', '.join(['w', *items])} FROM ({rows}) AS p"
    return rows


def rows_statement(target: Target, core: Sequence[Column], steps: Sequence[Step], relation: str | None) -> str:
    """The statement that applies a delta of the core's rows."""
    rows = incoming([(column.id, column.type) for column in core], relation)
    if target.empty:
        return f"WITH z AS ({finished(rows, steps)}){_fill(target)}"
    return f"WITH z AS MATERIALIZED ({finished(rows, steps)}){_change(target)}"


def additive_statement(
    target: Target, additive: AdditiveForm, steps: Sequence[Step], state: str, relation: str | None
) -> str:
    """The statement that adds a delta to the groups' state and updates the affected groups."""
    keys, sums = additive.key_columns, additive.state_columns
    rows = incoming([*keys, *sums], relation)
    names = [ident(name) for name, _ in keys]
    group = f" GROUP BY {', '.join(names)}" if names else ""
    totals = ", ".join(f"sum({name})::{type_.name} AS {name}" for name, type_ in sums)
    both = ", ".join([*names, *(name for name, _ in sums)])
    added = ", ".join(f"{name} = s.{name} + excluded.{name}" for name, _ in sums)
    conflict = f"({', '.join(names)})" if names else "(singleton)"
    before = ", ".join(f"u.{name} - d.{name} AS {name}" for name, _ in sums)
    prefixed = "".join(f"u.{name}, " for name in names)
    equal = " AND ".join(f"u.{ident(name)} {type_.equals} d.{ident(name)}" for name, type_ in keys) or "true"
    old = f"SELECT {prefixed}{before}, u.known FROM up AS u JOIN d ON {equal}"
    if names and target.null_keys:
        # NULL-safe equality cannot be hashed, so only groups with a NULL are joined this way.
        same = " AND ".join(_same(f"u.{ident(name)}", f"d.{ident(name)}", type_) for name, type_ in keys)
        has_null = " OR ".join(f"d.{name} IS NULL" for name in names)
        old += f" UNION ALL SELECT {prefixed}{before}, u.known FROM up AS u JOIN d ON ({has_null}) AND {same}"
    alive = " WHERE n > 0" if additive.keys else ""
    z = " UNION ALL ".join(
        finished(_valued(source, additive, weight), steps)
        for source, weight in (
            (f"SELECT * FROM up AS u{alive}", 1),
            (f"SELECT * FROM old{alive or ' WHERE known'}", -1),
        )
    )
    return (
        f"WITH d AS MATERIALIZED (SELECT {', '.join([*names, totals])} FROM ({rows}) AS i{group}),"
        f" up AS (INSERT INTO {state} AS s ({both}) SELECT {both} FROM d"
        f" ON CONFLICT {conflict} DO UPDATE SET {added}, known = true RETURNING {both}, known),"
        f" old AS ({old}),"
        f" z AS MATERIALIZED ({z}){_change(target, ', (SELECT count(*) FROM up WHERE n = 0)')}"
    )


def _valued(source: str, additive: AdditiveForm, weight: int) -> str:
    items = [f"{weight}::bigint AS w"]
    items += [f"k{i} AS {ident(key.id)}" for i, key in enumerate(additive.keys)]
    items += [f"{expression_sql(value)} AS {ident(column.id)}" for column, value in additive.values]
    return f"SELECT {', '.join(items)} FROM ({source}) AS g"


def resync_statement(target: Target, additive: AdditiveForm, steps: Sequence[Step], state: str) -> str:
    """The statement that makes the stream table match the groups' state."""
    alive = " WHERE n > 0" if additive.keys else ""
    return _replacement(target, finished(_valued(f"SELECT * FROM {state}{alive}", additive, 1), steps))


def replace_statement(target: Target, core: Sequence[Column], steps: Sequence[Step], relation: str | None) -> str:
    """The statement that makes the stream table match the core's rows, all of which are given."""
    rows = incoming([(column.id, column.type) for column in core], relation)
    return _replacement(target, finished(rows, steps))


def _replacement(target: Target, new: str) -> str:
    """A statement that applies the difference between the new rows and the stored rows."""
    names = ", ".join(f"{ident(column.name)} AS {ident(column.id)}" for column in target.columns)
    stored = f"SELECT -1::bigint AS w, {names} FROM {target.table}"
    ids = ", ".join(ident(column.id) for column in target.columns)
    return (
        f"WITH a AS MATERIALIZED ({new} UNION ALL {stored}),"
        f" h AS (SELECT a.*, {_row_id(target, whole=True)} AS h FROM a),"
        f" c AS (SELECT h, sum(w) AS w FROM h GROUP BY h HAVING sum(w) <> 0),"
        f" z AS MATERIALIZED (SELECT DISTINCT ON (h.h) c.w::bigint AS w, {ids} FROM h JOIN c USING (h)"
        f" ORDER BY h.h){_change(target)}"
    )


def _same(one: str, other: str, type_: PgType) -> str:
    """SQL for: equal, or both NULL."""
    return f"({one} {type_.equals} {other} OR {one} IS NULL AND {other} IS NULL)"


def _fill(target: Target) -> str:
    names = [ident(column.name) for column in target.columns]
    values = [ident(column.id) for column in target.columns]
    copies = ", generate_series(1, z.w)" if target.key is None else ""
    if target.has_row_id:
        names.append(ROW_ID)
        values.append(_row_id(target))
    return (
        f", ins AS (INSERT INTO {target.table} ({', '.join(names)}) SELECT {', '.join(values)} FROM z{copies} RETURNING 1)"
        " SELECT ARRAY[(SELECT count(*) FROM ins), 0, 0]"
    )


def _row_id(target: Target, *, whole: bool = False) -> str:
    """SQL for a hash of the row, or of its key if there is one and `whole` is not set."""
    if target.key is None or whole:
        printed = ", ".join(form_sql(ident(column.id), column.type, "text") for column in target.columns)
    else:
        keys = [column for column in target.columns if column.name in target.key]
        printed = ", ".join(form_sql(ident(column.id), column.type, "key") for column in keys)
    function = "_former_row_id" if target.former_row_ids and not whole else "_row_id"
    return f"pgtrickle.{function}(ROW({printed})::text)"


def new_row_ids_statement(target: Target) -> str:
    """The statement that replaces row ids computed by an earlier version."""
    stored = tuple(replace(column, id=column.name) for column in target.columns)
    row_id = _row_id(replace(target, columns=stored))
    return f"WITH u AS (UPDATE {target.table} SET {ROW_ID} = {row_id} RETURNING 1) SELECT ARRAY[count(*)] FROM u"


def _change(target: Target, more: str = "") -> str:
    """The rest of the statement: what it does with z, and the counts that it returns, with `more` at the end."""
    if target.stage is not None:
        ids = ", ".join(ident(column.id) for column in target.columns)
        names = ", ".join(target.staged(column) for column in target.columns)
        return (
            f", f AS (INSERT INTO {target.stage} (w, row_id, {names})"
            f" SELECT w, {_row_id(target)}, {ids} FROM z RETURNING 1)"
            f" SELECT ARRAY[(SELECT count(*) FROM f), 0, 0{more}]"
        )
    return _change_by_key(target, more) if target.key is not None else _change_by_row(target, more)


def _change_by_key(target: Target, more: str) -> str:
    assert target.key is not None
    ids = {column.name: ident(column.id) for column in target.columns}
    keys = [ids[name] for name in target.key]
    names = ", ".join(ident(column.name) for column in target.columns)
    values = ", ".join(ids[column.name] for column in target.columns)
    listed = ", ".join(keys) or "true"
    # A key with a new row is not deleted: its row is inserted or updated.
    plus = f"SELECT {values} FROM z WHERE w > 0"
    gone = f"SELECT DISTINCT {listed} FROM z WHERE w < 0"
    kept = f"SELECT {listed} FROM z WHERE w > 0"
    types = {column.name: column.type for column in target.columns}
    match = " AND ".join(f"t.{ident(name)} {types[name].equals} g.{ids[name]}" for name in target.key)
    others = [column for column in target.columns if column.name not in target.key]
    sets = ", ".join(f"{ident(column.name)} = excluded.{ident(column.name)}" for column in others)
    if not target.key:
        # At most one row: update it in place, because one statement cannot delete and insert the same key.
        fresh = ", ".join(f"{ident(column.name)} = p.{ids[column.name]}" for column in target.columns)
        return (
            f", p AS MATERIALIZED ({plus}), there AS MATERIALIZED (SELECT count(*) AS n FROM {target.table}),"
            f" del AS (DELETE FROM {target.table} WHERE NOT EXISTS (SELECT FROM p) AND EXISTS (SELECT FROM z) RETURNING 1),"
            f" upd AS (UPDATE {target.table} SET {fresh} FROM p RETURNING 1),"
            f" ins AS (INSERT INTO {target.table} ({names}) SELECT {values} FROM p, there WHERE there.n = 0 RETURNING 1)"
            " SELECT ARRAY[(SELECT count(*) FROM ins) + (SELECT count(*) FROM upd), (SELECT count(*) FROM del), 0"
            f"{more}]"
        )
    action = f"UPDATE SET {sets}" if sets else "NOTHING"
    conflict = ", ".join(ident(name) for name in target.key)
    deletes = [f"del AS (DELETE FROM {target.table} AS t USING g WHERE {match} RETURNING 1)"]
    deleted = "(SELECT count(*) FROM del)"
    if target.null_keys:
        null_match = " AND ".join(_same(f"t.{ident(name)}", f"g.{ids[name]}", types[name]) for name in target.key)
        has_null = " OR ".join(f"g.{ids[name]} IS NULL" for name in target.key)
        deletes.append(
            f"deln AS (DELETE FROM {target.table} AS t USING g WHERE ({has_null}) AND {null_match} RETURNING 1)"
        )
        deleted += " + (SELECT count(*) FROM deln)"
    return (
        f", g AS MATERIALIZED ({gone} EXCEPT {kept}), {', '.join(deletes)},"
        f" ins AS (INSERT INTO {target.table} ({names}) {plus} ON CONFLICT ({conflict}) DO {action} RETURNING 1)"
        f" SELECT ARRAY[(SELECT count(*) FROM ins), {deleted}, (SELECT count(*) FROM g) - ({deleted}){more}]"
    )


def _change_by_row(target: Target, more: str) -> str:
    names = ", ".join(ident(column.name) for column in target.columns)
    values = ", ".join(ident(column.id) for column in target.columns)
    return (
        f", i AS MATERIALIZED (SELECT z.*, {_row_id(target)} AS row_id FROM z),"
        f" net AS MATERIALIZED (SELECT row_id, sum(w)::bigint AS w FROM i GROUP BY row_id HAVING sum(w) <> 0),"
        f" del AS (DELETE FROM {target.table} WHERE ctid = ANY (ARRAY(SELECT x.ctid FROM (SELECT t.ctid, -net.w AS n,"
        f" row_number() OVER (PARTITION BY t.{ROW_ID}) AS rank FROM {target.table} AS t"
        f" JOIN net ON t.{ROW_ID} = net.row_id WHERE net.w < 0) AS x WHERE x.rank <= x.n)) RETURNING 1),"
        f" one AS (SELECT DISTINCT ON (row_id) * FROM i WHERE w > 0 ORDER BY row_id),"
        f" ins AS (INSERT INTO {target.table} ({names}, {ROW_ID}) SELECT {values}, one.row_id FROM one"
        f" JOIN net ON net.row_id = one.row_id AND net.w > 0, generate_series(1, net.w) RETURNING 1)"
        f" SELECT ARRAY[(SELECT count(*) FROM ins), (SELECT count(*) FROM del),"
        f" (SELECT coalesce(sum(-w), 0)::bigint FROM net WHERE w < 0) - (SELECT count(*) FROM del){more}]"
    )

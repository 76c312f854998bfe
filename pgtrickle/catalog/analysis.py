"""PostgreSQL's analysis of a query: relations, columns and types. The planner never derives them itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from sqlglot import exp

from pgtrickle.catalog.query_files import load_query
from pgtrickle.query.conditions import unwrap
from pgtrickle.query.dialect import parse
from pgtrickle.query.plan import Column, Relation, RelationColumn
from pgtrickle.query.types import PgType
from pgtrickle.query.unsupported import Unsupported

GONE = -1  # the attnum of a column that was dropped or retyped in its own database


@dataclass
class Analysis:
    """Types and relations as the connected database has them. Each type is queried only once."""

    conn: psycopg.Connection[Any]
    create: Callable[[str], None] | None = None  # creates a view with the rights of the query's owner
    collated: bool = False  # whether a column or expression has another collation than its type's default
    own_operators: bool = False  # whether the query uses operators that are not PostgreSQL's own
    _types: dict[tuple[int, int], PgType] = field(default_factory=dict)
    _casts: dict[tuple[str, str], tuple[str | None, str | None]] = field(default_factory=dict)

    def types(self, wanted: Sequence[tuple[int, int]]) -> list[PgType]:
        """Types by OID and typmod."""
        missing = [key for key in dict.fromkeys(wanted) if key not in self._types]
        if missing:
            with self.conn.cursor(row_factory=dict_row) as cursor:
                cursor.execute(
                    load_query("types"), {"oids": [oid for oid, _ in missing], "typmods": [mod for _, mod in missing]}
                )
                for row in cursor:
                    self._types[missing[row["ord"] - 1]] = PgType(
                        row["oid"],
                        row["typmod"],
                        row["name"],
                        row["is_enum"],
                        groupable=row["groupable"],
                        equals=row["equals"],
                    )
        return [self._types[key] for key in wanted]

    def relations(self, view: int) -> dict[tuple[str, str], Relation]:
        """All relations that the view reads, by schema and name, including the view itself."""
        with self.conn.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(load_query("relations"), {"view": view}).fetchall()
            buffers = {
                row["oid"]: row["relname"]
                for row in cursor.execute(
                    "SELECT t.source_relid::oid::bigint AS oid, c.relname FROM pgtrickle.pgt_change_tracking t"
                    " JOIN pg_class c ON c.oid = t.buffer_relid"
                )
            }
            foreign = {row["relid"]: row for row in cursor.execute(load_query("stand_ins"))}
            found = {"relations": [row["oid"] for row in rows]}
            shards = cursor.execute(load_query("shards"), found).fetchall()
        columns = [item for row in rows for item in row["columns"] or []]
        self.collated = any(item["collation"] for item in columns) or any(
            " COLLATE " in (row["definition"] or "") for row in rows
        )
        self.own_operators = any(row["own_operators"] for row in rows)
        types = iter(self.types([(item["type"], item["typmod"]) for item in columns]))
        result = {}
        for row in rows:
            fields = tuple(
                RelationColumn(
                    item["name"],
                    item["attnum"],
                    replace(next(types), collation=item["collation"], deterministic=item["deterministic"]),
                    item["not_null"],
                    item["generated"],
                )
                for item in row["columns"] or []
            )
            relation = Relation(
                row["oid"],
                row["schema"],
                row["name"],
                row["kind"],
                fields,
                tuple(row["key"] or ()),
                row["definition"],
                buffers.get(row["oid"]),
            )
            if row["oid"] in foreign:
                relation = _remote(relation, foreign[row["oid"]])
            members = tuple(_member(relation, shard) for shard in shards if shard["relid"] == row["oid"])
            result[row["schema"], row["name"]] = replace(relation, members=members) if members else relation
        return result

    def types_of(self, columns: Sequence[Column], expressions: Sequence[exp.Expression]) -> list[PgType]:
        """The types that PostgreSQL gives to expressions over columns of known types."""
        if not expressions:
            return []
        nulls = ", ".join(f"{column.type.cast('NULL')} AS {column.id}" for column in columns)
        values = ", ".join(f"{item.sql(dialect='postgres')} AS v{i}" for i, item in enumerate(expressions))
        grouped = f"SELECT {values} FROM (SELECT {nulls}) AS s LIMIT 0"
        return self._describe(grouped)

    def union_types(self, branches: Sequence[Sequence[PgType]]) -> list[PgType]:
        """The column types of a set operation over branches of these types."""
        selects = [", ".join(f"{type_.cast('NULL')} AS v{i}" for i, type_ in enumerate(branch)) for branch in branches]
        return self._describe(" UNION ALL ".join(f"SELECT {items}" for items in selects) + " LIMIT 0")

    def casts_for_equality(self, left: PgType, right: PgType) -> tuple[str | None, str | None]:
        """The types to which PostgreSQL casts two values before it compares them by `=`; None if there is no cast."""
        if self.own_operators:
            raise Unsupported(
                "the query compares by operators that are not PostgreSQL's own, and its text does not show which of them"
                " USING and IN mean: compare by ON or EXISTS instead"
            )
        if left.oid == right.oid:
            return None, None
        names = left.name, right.name
        if names not in self._casts:
            question = (
                f"SELECT s.l = s.r AS equal FROM (SELECT {left.cast('NULL')} AS l, {right.cast('NULL')} AS r) AS s"
            )
            with self._view(question) as view:
                row = self.conn.execute("SELECT pg_get_viewdef(%s::regclass)", (view,)).fetchone()
            assert row is not None
            self._casts[names] = _casts_in(row[0])
        return self._casts[names]

    @contextmanager
    def _view(self, text: str) -> Iterator[str]:
        """Create a view of a query for the duration of the block; yields its name."""
        with self.conn.transaction(force_rollback=True):
            statement = f"CREATE TEMP VIEW pgt_types AS {text}"
            if self.create is not None:
                self.create(statement)
            else:
                self.conn.execute(sql.SQL(statement))
            yield "pg_temp.pgt_types"

    def _describe(self, text: str) -> list[PgType]:
        """The types of a query's columns. The query is only analysed: planning would evaluate immutable functions."""
        if self.create is None and not self.collated:
            return self._describe_statement(text)
        try:
            with self._view(text) as view:
                found = self.conn.execute(load_query("view_columns"), (view,)).fetchall()
        except psycopg.errors.InvalidTableDefinition:  # a column of an anonymous row type
            if self.create is not None:
                raise
            return self._describe_statement(text)
        types = self.types([(oid, typmod) for oid, typmod, _, _ in found])
        return [
            replace(type_, collation=collation, deterministic=deterministic)
            for type_, (_, _, collation, deterministic) in zip(types, found, strict=True)
        ]

    def _describe_statement(self, text: str) -> list[PgType]:
        pgconn = self.conn.pgconn
        encoding = self.conn.info.encoding
        with self.conn.lock:
            result = pgconn.prepare(b"", text.encode(encoding))
            if result.status == psycopg.pq.ExecStatus.COMMAND_OK:
                result = pgconn.describe_prepared(b"")
        if result.status != psycopg.pq.ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(result, encoding)
        return self.types([(result.ftype(i), result.fmod(i)) for i in range(result.nfields)])


def _casts_in(definition: str) -> tuple[str | None, str | None]:
    """The casts on the two sides of the comparison that a view selects."""
    comparison = unwrap(parse(definition).expressions[0].unalias())
    if not isinstance(comparison, exp.EQ):
        raise Unsupported("it is not known how two types are compared", comparison)
    sides = [unwrap(side) for side in (comparison.this, comparison.expression)]
    left, right = (side.to.sql(dialect="postgres") if isinstance(side, exp.Cast) else None for side in sides)
    return left, right


def _remote(stand_in: Relation, known: dict[str, Any]) -> Relation:
    """The table of another database that an empty table in this one represents."""
    there = {item["name"]: item for item in known["columns"]}
    gone: dict[str, Any] = {"attnum": GONE, "generated": None}
    fields = tuple(
        replace(field_, attnum=column["attnum"], generated=column["generated"])
        for field_ in stand_in.columns
        for column in [there.get(field_.name, gone)]
    )
    key = stand_in.key
    if known.get("resolved"):  # PostgreSQL does not verify constraints of a foreign table, and it has no key
        fields = tuple(replace(one, not_null=there.get(one.name, {}).get("not_null", False)) for one in fields)
        key = tuple(known["key"] or ()) if {one.name for one in fields}.issuperset(known["key"] or ()) else ()
    return replace(
        stand_in,
        key=key,
        kind="r",
        schema=known["source_schema"],
        name=known["source_name"],
        columns=fields,
        buffer=f"changes_{known['source_stable_name']}",
        database=known["database"],
    )


def _member(stand_in: Relation, shard: dict[str, Any]) -> Relation:
    """The table of one member of a set; every member has one."""
    if shard["spread"] and not shard["database"]:
        return replace(stand_in, spread=True)
    if shard["spread"]:  # its columns have the same attnums on all nodes as here
        return replace(
            stand_in,
            oid=shard["member_relid"],
            buffer=f"changes_{shard['source_stable_name']}",
            database=shard["database"],
            shard=True,
            spread=True,
        )
    own = replace(
        stand_in, oid=shard["member_relid"], columns=stand_in.columns[1:], key=tuple(shard["key"] or ()), shard=True
    )
    return _remote(own, shard)


def aggregate_names(conn: psycopg.Connection[Any]) -> frozenset[str]:
    """The names of all aggregate functions in the database."""
    rows = conn.execute("SELECT DISTINCT proname FROM pg_proc WHERE prokind = 'a'").fetchall()
    return frozenset(row[0] for row in rows)

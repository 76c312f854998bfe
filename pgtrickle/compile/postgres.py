"""Compile a plan to PostgreSQL's SQL: the part that a source computes.

States (NEW and OLD scans) are plain relations; a change has its weights in column `w`. The old state of a table is the
new one minus the change. Rows are subtracted by their printed text, so that 1.0 and 1.00 remain two rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from sqlglot import exp

from pgtrickle.compile.sql_text import PART, SHARDS, SqlText, hole, ident
from pgtrickle.query.budget import check_text
from pgtrickle.query.conditions import conjunction
from pgtrickle.query.dialect import parse
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Flip,
    InnerJoin,
    Join,
    KeyFilter,
    Negate,
    Plan,
    Project,
    Regroup,
    RelationColumn,
    Scan,
    UnionAll,
    Values,
    Version,
    at_version,
)
from pgtrickle.query.types import (
    BOOL,
    BPCHAR,
    DATE,
    FLOAT4,
    FLOAT8,
    INTERVAL,
    NUMERIC,
    TIMESTAMP,
    TIMESTAMPTZ,
    Form,
    PgType,
)

CHANGES_SCHEMA = "pgtrickle_changes"
DATE_EPOCH = "'2000-01-01'"


@lru_cache(maxsize=8192)
def compile_fragment(plan: Plan, forms: tuple[tuple[Column, Form], ...], *, in_parts: bool = False) -> SqlText:
    """The statement that returns the fragment's rows: the requested forms of its columns, then the weight.

    With `in_parts`, its one scan has a hole for a condition on the blocks of the table. Changes need no such hole: the
    condition that fills their own hole restricts them to the part.
    """
    compiler = _Compiler(in_parts)
    rows, weighted = compiler.rows(plan)
    items = [f"{form_sql(ident(column.id), column.type, form)} AS {form_name(column, form)}" for column, form in forms]
    items.append(("w" if weighted else "1") + "::bigint AS w")
    return SqlText(f"SELECT {', '.join(items)} FROM ({rows}) AS f", tuple(compiler.keys))


def form_name(column: Column, form: Form) -> str:
    """The name of a column's form in flight. If the text can serve as the key, there is only the text."""
    if form == "key" and column.type.text_is_identity:
        form = "text"
    return f"{column.id}_{form[0]}"


def form_sql(name: str, type_: PgType, form: Form) -> str:
    """The PostgreSQL expression for a column in the given form."""
    if form == "text" or (form == "key" and type_.text_is_identity):
        if type_.oid == BPCHAR:  # a cast of char(n) to text drops trailing blanks; the type's output keeps them
            return f"textin(bpcharout({name}))"
        # A cast of a user's type to text may call a function of that user; concat() uses the type's output.
        return (
            f"({name})::text"
            if type_.is_built_in
            else f"CASE WHEN {name} IS DISTINCT FROM NULL THEN concat({name}) END"
        )
    if form == "key":
        if type_.oid == NUMERIC:
            return f"trim_scale({name})::text"
        if type_.oid in {FLOAT4, FLOAT8}:
            return f"({name} + 0)::text"  # -0 becomes 0
        if type_.oid == INTERVAL:
            return _interval_key(name)
        return f"({name})::text"
    if type_.oid == DATE:
        return (
            f"CASE WHEN isfinite({name}) THEN ({name} - date {DATE_EPOCH})::bigint"
            f" WHEN {name} > date {DATE_EPOCH} THEN 2147483647 WHEN {name} < date {DATE_EPOCH} THEN -2147483648 END"
        )
    if type_.oid in {TIMESTAMP, TIMESTAMPTZ}:
        return (
            f"CASE WHEN isfinite({name}) THEN (extract(epoch FROM {name}) * 1000000)::bigint"
            f" WHEN {name} > {DATE_EPOCH} THEN 9223372036854775807"
            f" WHEN {name} < {DATE_EPOCH} THEN -9223372036854775808 END"
        )
    if type_.is_decimal:
        # NaN is greater than every number, and so is a number beyond the type's range.
        return f"CASE WHEN {name} = 'NaN' THEN {decimal_nan(type_)} ELSE {name} END"
    return name if type_.oid == BOOL else f"({name})::bigint"


def _interval_key(name: str) -> str:
    """The key of an interval. Intervals are equal if their seconds are, with days of 24 hours and months of 30 days."""
    months = f"extract(year FROM {name}) * 12 + extract(month FROM {name})"
    days = f"(({months}) * 30 + extract(day FROM {name}))"
    hours = f"({days} * 24 + extract(hour FROM {name}))"
    seconds = f"({hours} * 60 + extract(minute FROM {name})) * 60 + extract(second FROM {name})"
    return f"CASE WHEN isfinite({name}) THEN trim_scale({seconds})::text ELSE ({name})::text END"


def form_type(type_: PgType, form: Form) -> str:
    """The PostgreSQL type of the expression that `form_sql` returns."""
    if form != "native":
        return "text"
    if type_.oid == BOOL:
        return "boolean"
    return "numeric" if type_.is_decimal else "bigint"


def decimal_nan(type_: PgType) -> str:
    """The number that represents NaN of a numeric(p,s)."""
    assert type_.precision is not None
    assert type_.scale is not None
    return "1" + "0" * (type_.precision - type_.scale)


def expression_sql(node: exp.Expression) -> str:
    return node.sql(dialect="postgres")


def with_collations(condition: exp.Expression, columns: Sequence[Column]) -> exp.Expression:
    """The condition of a semi-join, with the collation of each equality named on both sides.

    PostgreSQL up to 15.18 removes duplicates from the inner side by that side's own collation. If that tells apart what
    the comparison considers equal, the semi-join returns a row of the outer side several times.
    """
    types = {column.id: column.type for column in columns}

    def name(node: exp.Expression) -> exp.Expression:
        if not (
            isinstance(node, exp.EQ) and isinstance(node.this, exp.Column) and isinstance(node.expression, exp.Column)
        ):
            return node
        left, right = types[node.this.name], types[node.expression.name]
        if left.collation == right.collation or (left.deterministic and right.deterministic):
            return node
        # One of the two has the default collation: PostgreSQL refuses to compare two others.
        side, collation = ("expression", left.collation) if left.collation else ("this", right.collation)
        node.set(side, parse(f"{expression_sql(node.args[side])} COLLATE {collation}"))
        return node

    return condition.copy().transform(name, copy=False)


@dataclass
class _Compiler:
    in_parts: bool
    keys: list[KeyFilter] = field(default_factory=list)

    def rows(self, plan: Plan) -> tuple[str, bool]:
        """SQL for the plan's rows, and whether it has a weight column."""
        rows, weighted = self._rows(plan)
        return check_text(rows), weighted

    def _rows(self, plan: Plan) -> tuple[str, bool]:
        match plan:
            case Scan():
                return self._scan(plan)
            case Values(columns=columns, rows=constants):
                if not columns:
                    return ("SELECT" if constants else "SELECT WHERE false"), False
                names = ", ".join(ident(column.id) for column in columns)
                lines = ", ".join(f"({', '.join(expression_sql(value) for value in row)})" for row in constants)
                if not constants:
                    nulls = ", ".join(column.type.cast("NULL") for column in columns)
                    return f"SELECT {names} FROM (VALUES ({nulls})) AS v({names}) WHERE false", False
                return f"SELECT {names} FROM (VALUES {lines}) AS v({names})", False
            case Filter(input=child, condition=condition):
                rows, weighted = self.rows(child)
                return (
                    f"{_select(child.columns, weighted)} FROM ({rows}) AS f WHERE {expression_sql(condition)}",
                    weighted,
                )
            case KeyFilter():
                return self._key_filter(plan)
            case Project(input=child, items=items):
                rows, weighted = self.rows(child)
                parts = [f"{expression_sql(value)} AS {ident(column.id)}" for column, value in items]
                return f"SELECT {', '.join(parts + ['w'] * weighted)} FROM ({rows}) AS p", weighted
            case InnerJoin():
                return self._inner_join(plan)
            case Join(kind=kind, left=left, right=right, condition=condition):
                return self._join(kind, left, right, condition)
            case Exists(left=left, right=right, condition=condition, mark=mark):
                rows, weighted = self.rows(left)
                found = f"{self._found(left, right, condition)} AS {ident(mark.id)}"
                return f"{_select(left.columns, weighted, [found])} FROM ({rows}) AS l", weighted
            case Aggregate(input=child, keys=keys, calls=calls):
                rows, weighted = self.rows(child)
                assert not weighted, "aggregates are recomputed from states"
                parts = [ident(key.id) for key in keys]
                group = f" GROUP BY {', '.join(parts)}" if parts else ""
                parts += [f"{expression_sql(call)} AS {ident(column.id)}" for column, call in calls]
                return f"SELECT {', '.join(parts)} FROM ({rows}) AS a{group}", False
            case UnionAll(inputs=inputs, columns=columns):
                return self._union([(child, 1) for child in inputs], columns)
            case Negate(input=child):
                return self._union([(child, -1)], plan.columns)
            case Regroup(new=new, old=old):
                return self._union([(new, 1), (old, -1)], plan.columns)
            case Flip():
                return self._flip(plan)
            case _:
                raise AssertionError(f"{type(plan).__name__} inside a fragment")

    def _scan(self, plan: Scan) -> tuple[str, bool]:
        relation = plan.relation
        table = f"{ident(relation.schema)}.{ident(relation.name)}"
        if relation.spread:
            table = f"({hole(f'{SHARDS}{relation.oid}')}) AS t"
        stored = [f"{ident(item.name)} AS {ident(column.id)}" for column, item in plan.fields]
        if plan.version is Version.NEW:
            where = f" WHERE {hole(PART)}" if self.in_parts else ""
            return f"SELECT {', '.join(stored)} FROM {table}{where}", False
        assert relation.buffer is not None, f"{relation.label} is not captured"
        changes = hole(relation.buffer)
        changed = [
            f"{expression_sql(buffered(item, relation.columns))} AS {ident(column.id)}" for column, item in plan.fields
        ]
        if plan.version is Version.DELTA:
            items = ", ".join([*changed, "__pgt_w::bigint AS w"])
            return f"SELECT {items} FROM {changes}", True
        both = (
            f"SELECT {', '.join([*stored, '1 AS w'])} FROM {table} UNION ALL"
            f" SELECT {', '.join([*changed, '-__pgt_w AS w'])} FROM {changes}"
        )
        values, groups = [], []
        for column, _ in plan.fields:
            name = ident(column.id)
            printed = form_sql(name, column.type, "text")
            if column.type.groupable:
                groups.append(name)
                values.append(name)
                if not column.type.text_is_identity:
                    groups.append(f'{printed} COLLATE "C"')  # a cast to text keeps the column's collation
            else:
                groups.append(printed)
                values.append(f"{column.type.from_text(f'({printed})')} AS {name}")
        group = f" GROUP BY {', '.join(groups)}" if groups else ""
        net = f"SELECT {', '.join([*values, 'sum(w) AS w'])} FROM ({both}) AS b{group} HAVING sum(w) > 0"
        return f"{_select(plan.columns, False)} FROM ({net}) AS n, generate_series(1, n.w)", False

    def _key_filter(self, plan: KeyFilter) -> tuple[str, bool]:
        rows, weighted = self.rows(plan.input)
        self.keys.append(plan)
        condition = hole(f"key{len(self.keys) - 1}")
        return f"{_select(plan.columns, weighted)} FROM ({rows}) AS k WHERE {condition}", weighted

    def _inner_join(self, plan: InnerJoin) -> tuple[str, bool]:
        # As a list without JOIN: PostgreSQL keeps the order of joins that are written out, if they are many.
        parts = [self.rows(child) for child in plan.inputs]
        weights = [f"j{i}.w" for i, (_, weighted) in enumerate(parts) if weighted]
        names = [ident(column.id) for column in plan.columns]
        items = names + ([" * ".join(weights) + " AS w"] if weights else [])
        tables = ", ".join(f"({rows}) AS j{i}" for i, (rows, _) in enumerate(parts))
        condition = expression_sql(conjunction(plan.conditions))
        return f"SELECT {', '.join(items)} FROM {tables} WHERE {condition}", bool(weights)

    def _join(self, kind: str, left: Plan, right: Plan, condition: exp.Expression) -> tuple[str, bool]:
        left_rows, left_weighted = self.rows(left)
        right_rows, right_weighted = self.rows(right)
        weights = ["l.w"] * left_weighted + ["r.w"] * right_weighted
        names = [ident(column.id) for column in (*left.columns, *right.columns)]
        items = names + ([" * ".join(weights) + " AS w"] if weights else [])
        words = {"left": "LEFT JOIN", "right": "RIGHT JOIN", "full": "FULL JOIN"}
        return (
            f"SELECT {', '.join(items)} FROM ({left_rows}) AS l {words[kind]} ({right_rows}) AS r"
            f" ON {expression_sql(condition)}",
            bool(weights),
        )

    def _found(self, left: Plan, right: Plan, condition: exp.Expression) -> str:
        named = with_collations(condition, (*left.columns, *right.columns))
        return f"EXISTS (SELECT FROM ({self.rows(right)[0]}) AS r WHERE {expression_sql(named)})"

    def _union(self, terms: Iterable[tuple[Plan, int]], columns: tuple[Column, ...]) -> tuple[str, bool]:
        parts = []
        for child, sign in terms:
            rows, weighted = self.rows(child)
            names = [
                f"{ident(theirs.id)} AS {ident(ours.id)}" for theirs, ours in zip(child.columns, columns, strict=True)
            ]
            weight = f"{'-' if sign < 0 else ''}{'w' if weighted else '1'} AS w"
            parts.append((names, weight, rows, weighted or sign < 0))
        any_weighted = any(weighted for *_, weighted in parts)
        selects = [
            f"SELECT {', '.join(names + [weight] * any_weighted)} FROM ({rows}) AS u"
            for names, weight, rows, _ in parts
        ]
        return " UNION ALL ".join(selects), any_weighted

    def _flip(self, plan: Flip) -> tuple[str, bool]:
        old_left, _ = self.rows(at_version(plan.left, Version.OLD))
        now, before, touched = (
            self._found(plan.left, right, plan.condition)
            for right in (plan.right, at_version(plan.right, Version.OLD), plan.right_delta)
        )
        names = [ident(column.id) for column in plan.left.columns]
        items = ", ".join([*names, f"v.m AS {ident(plan.mark.id)}", "v.s::bigint AS w"])
        return (
            f"SELECT {items} FROM ({old_left}) AS l"
            f" CROSS JOIN LATERAL (SELECT {now} AS n, {before} AS o) AS e"
            f" CROSS JOIN LATERAL (VALUES (e.n, 1), (e.o, -1)) AS v(m, s) WHERE {touched} AND e.n <> e.o",
            True,
        )


def _select(columns: Iterable[Column], weighted: bool, more: Sequence[str] = ()) -> str:
    return f"SELECT {', '.join([*(ident(column.id) for column in columns), *more, *(['w'] * weighted)])}"


def buffered(item: RelationColumn, columns: Sequence[RelationColumn]) -> exp.Expression:
    """A source column as the change buffer stores it; a virtual column is computed from the columns it depends on."""
    if item.generated is None:
        return exp.column(f"c{item.attnum}")
    attnums = {column.name: column.attnum for column in columns}

    def swap(node: exp.Expression) -> exp.Expression:
        return exp.column(f"c{attnums[node.name]}") if isinstance(node, exp.Column) else node

    return exp.Paren(this=parse(item.generated).transform(swap))

"""From PostgreSQL's canonical text of a query to a plan.

The text comes from `pg_get_viewdef`, so names are resolved, `*` is expanded and casts are explicit. Whatever this
version of the planner cannot maintain differentially raises `Unsupported` with the reason and the part of the query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sqlglot import exp

from pgtrickle.query.conditions import cast_to, conjunction, conjuncts, unwrap
from pgtrickle.query.dialect import parse
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Filter,
    JoinKind,
    Plan,
    Project,
    Relation,
    Scan,
    UnionAll,
    Values,
    join_of,
    used_ids,
)
from pgtrickle.query.scope import Entry, Scope
from pgtrickle.query.subqueries import has_subquery, lift_condition, lift_value
from pgtrickle.query.types import PgType
from pgtrickle.query.unsupported import Unsupported, require_only

DATABASE_COLUMN = "pgt_database"  # in a table of a database set: the member that the row is from


class Typing(Protocol):
    """PostgreSQL's type resolution: for expressions over columns of known types, set operations and comparisons."""

    def types_of(self, columns: Sequence[Column], expressions: Sequence[exp.Expression]) -> list[PgType]: ...

    def union_types(self, branches: Sequence[Sequence[PgType]]) -> list[PgType]: ...

    def casts_for_equality(self, left: PgType, right: PgType) -> tuple[str | None, str | None]: ...


@dataclass(frozen=True)
class Bound:
    """A bound query: its plan and its named output columns, in order."""

    plan: Plan
    output: tuple[Column, ...]


MOST_QUERIES = 2_000


@dataclass
class Binder:
    """Binds one query, given the relations, the types and the names of aggregates."""

    relations: Mapping[tuple[str, str], Relation]
    typing: Typing
    aggregates: frozenset[str]
    _next: int = 0
    _queries: int = 0  # bound so far
    _ctes: list[dict[str, exp.CTE]] = field(default_factory=list)

    def column(self, name: str, type_: PgType) -> Column:
        self._next += 1
        return Column(f"c{self._next}", name, type_)

    def bind_text(self, text: str) -> Bound:
        return self.bind(parse(text), None)

    def bind(self, node: exp.Expression, outer: Scope | None) -> Bound:
        """Bind any query expression: SELECT, set operation, VALUES, or one of these in parentheses."""
        self._queries += 1
        if self._queries > MOST_QUERIES:  # a view reads another one twice, that one a third one twice, and so on
            raise Unsupported(f"its views and subqueries unfold to more than {MOST_QUERIES} queries")
        with_ = node.args.get("with_")
        if with_ is not None:
            if with_.args.get("recursive"):
                raise Unsupported("recursive queries are not maintained differentially", with_)
            self._ctes.append({cte.alias: cte for cte in with_.expressions})
        try:
            return self._bind_body(node, outer)
        finally:
            if with_ is not None:
                self._ctes.pop()

    def _bind_body(self, node: exp.Expression, outer: Scope | None) -> Bound:
        if node.args.get("limit") or node.args.get("offset") or node.args.get("fetch"):
            raise Unsupported("LIMIT and OFFSET are not maintained differentially", node.args.get("limit") or node)
        if isinstance(node, exp.Subquery):
            return self.bind(node.this, outer)
        if isinstance(node, exp.Select):
            return self._bind_select(node, outer)
        if isinstance(node, exp.Union) and type(node) is exp.Union:
            return self._bind_union(node, outer)
        if isinstance(node, exp.Values):
            return self._bind_values(node)
        raise Unsupported(f"{node.key.upper()} is not maintained differentially", node)

    # -- set operations ------------------------------------------------------------------------------------------------

    def _bind_union(self, node: exp.Union, outer: Scope | None) -> Bound:
        require_only(node, {"this", "expression", "distinct", "with_", "order"})
        branches = [self.bind(node.this, outer), self.bind(node.expression, outer)]
        types = self.typing.union_types([[column.type for column in branch.output] for branch in branches])
        inputs = tuple(self._coerce(branch, types) for branch in branches)
        columns = tuple(
            self.column(column.name, type_) for column, type_ in zip(branches[0].output, types, strict=True)
        )
        plan: Plan = UnionAll(inputs, columns)
        if node.args.get("distinct"):
            plan = Aggregate(plan, columns, ())
        return Bound(plan, columns)

    def _coerce(self, branch: Bound, types: Sequence[PgType]) -> Plan:
        items = []
        for column, type_ in zip(branch.output, types, strict=True):
            same = (column.type.oid, column.type.typmod) == (type_.oid, type_.typmod)
            value = column.ref() if same else cast_to(column.ref(), type_.name)
            items.append((self.column(column.name, type_), value))
        return Project(branch.plan, tuple(items))

    def _bind_values(self, node: exp.Values) -> Bound:
        rows = [tuple(item.expressions) if isinstance(item, exp.Tuple) else (item,) for item in node.expressions]
        types = self.typing.union_types([self.typing.types_of((), row) for row in rows])
        alias = node.args.get("alias")
        names = [name.name for name in alias.columns] if alias is not None else []
        columns = tuple(
            self.column(names[i] if i < len(names) else f"column{i + 1}", type_) for i, type_ in enumerate(types)
        )
        return Bound(Values(columns, tuple(rows)), columns)

    # -- FROM ----------------------------------------------------------------------------------------------------------

    def _bind_from(self, select: exp.Select, scope: Scope) -> Plan:
        from_ = select.args.get("from_")
        if from_ is None:
            return Values((), ((),))
        plan = self._bind_source(from_.this, scope)
        for join in select.args.get("joins") or []:
            plan = self._bind_join(plan, join, scope, 0)
        return plan

    def _bind_source(self, node: exp.Expression, scope: Scope) -> Plan:
        """Bind one item of FROM, with the joins that sqlglot attaches to it."""
        start = len(scope.entries)
        alias = node.args.get("alias")
        if isinstance(node, exp.Table):
            plan = self._bind_table(node, scope)
        elif isinstance(node, exp.Subquery) and isinstance(node.this, exp.Table | exp.Subquery) and not node.is_wrapper:
            inner = Scope(outer=scope.outer)
            plan = self._bind_source(node.this, inner)
            scope.entries.extend(inner.entries if alias is None else [self._joined_entry(alias, inner)])
        elif isinstance(node, exp.Subquery) and isinstance(node.this, exp.Table | exp.Subquery):
            plan = self._bind_source(node.this, scope)
        elif isinstance(node, exp.Subquery | exp.Values):
            bound = self.bind(node.this if isinstance(node, exp.Subquery) else node, None)
            scope.entries.append(self._entry(node.alias, bound.output, alias))
            plan = bound.plan
        else:
            raise Unsupported(f"{node.key.upper()} in FROM is not maintained differentially", node)
        for join in node.args.get("joins") or []:
            plan = self._bind_join(plan, join, scope, start)
        return plan

    @staticmethod
    def _joined_entry(alias: exp.TableAlias, inner: Scope) -> Entry:
        names = [identifier.name for identifier in alias.columns]
        columns = [pair for entry in inner.entries for pair in entry.columns]
        if any(entry.hidden for entry in inner.entries):
            raise Unsupported("a join with USING and an alias of its own is not maintained differentially", alias)
        renamed = [(names[i] if i < len(names) else name, column) for i, (name, column) in enumerate(columns)]
        return Entry(alias.name, tuple(renamed))

    @staticmethod
    def _entry(alias: str, columns: Sequence[Column], node: exp.TableAlias | None) -> Entry:
        names = [identifier.name for identifier in node.columns] if node is not None else []
        return Entry(
            alias, tuple((names[i] if i < len(names) else column.name, column) for i, column in enumerate(columns))
        )

    def _bind_table(self, node: exp.Table, scope: Scope) -> Plan:
        if not isinstance(node.this, exp.Identifier):
            raise Unsupported("functions in FROM are not maintained differentially", node)
        require_only(node, {"this", "db", "alias", "joins"})
        alias = node.alias or node.name
        if not node.db:
            for level, ctes in reversed(list(enumerate(self._ctes))):
                if node.name in ctes:
                    bound = self._bind_cte(ctes[node.name], level)
                    scope.entries.append(self._entry(alias, bound.output, node.args.get("alias")))
                    return bound.plan
        relation = self.relations.get((node.db, node.name))
        if relation is None:
            raise Unsupported(f"relation {node.sql(dialect='postgres')} is not known", node)
        if relation.definition is not None:
            around, self._ctes = self._ctes, []
            bound = self.bind_text(relation.definition)
            self._ctes = around
            renamed = [(field_.name, column) for field_, column in zip(relation.columns, bound.output, strict=True)]
            scope.entries.append(Entry(alias, self._rename(renamed, node)))
            return bound.plan
        if relation.members:
            plan = self._bind_members(relation)
            named = [(item.name, column) for item, column in zip(relation.columns, plan.columns, strict=True)]
            scope.entries.append(Entry(alias, self._rename(named, node)))
            return plan
        if relation.kind not in {"r", "p"}:
            raise Unsupported(f"{relation.label} is not a table, its changes cannot be captured", node)
        fields = tuple((self.column(item.name, item.type), item) for item in relation.columns)
        scope.entries.append(Entry(alias, self._rename([(item.name, column) for column, item in fields], node)))
        return Scan(relation, fields)

    def _bind_members(self, relation: Relation) -> Plan:
        """The union of the tables of all members. In a database set, each row gets the name of its database."""
        inputs: list[Plan] = []
        for member in relation.members:
            fields = tuple((self.column(item.name, item.type), item) for item in member.columns)
            if member.spread:
                inputs.append(Scan(member, fields))
                continue
            name = self.column(DATABASE_COLUMN, relation.columns[0].type)
            items = [(name, exp.cast(exp.Literal.string(member.database), "text"))] + [
                (self.column(column.name, column.type), column.ref()) for column, _ in fields
            ]
            inputs.append(Project(Scan(member, fields), tuple(items)))
        return UnionAll(tuple(inputs), tuple(self.column(item.name, item.type) for item in relation.columns))

    @staticmethod
    def _rename(columns: list[tuple[str, Column]], node: exp.Table) -> tuple[tuple[str, Column], ...]:
        alias = node.args.get("alias")
        names = [identifier.name for identifier in alias.columns] if alias is not None else []
        return tuple((names[i] if i < len(names) else name, column) for i, (name, column) in enumerate(columns))

    def _bind_cte(self, cte: exp.CTE, level: int) -> Bound:
        ctes, self._ctes = (
            self._ctes,
            [*self._ctes[:level], {name: other for name, other in self._ctes[level].items() if name != cte.alias}],
        )
        try:
            bound = self.bind(cte.this, None)
        finally:
            self._ctes = ctes
        names = [identifier.name for identifier in cte.args["alias"].columns]
        output = tuple(
            Column(column.id, names[i] if i < len(names) else column.name, column.type)
            for i, column in enumerate(bound.output)
        )
        return Bound(bound.plan, output)

    def _bind_join(self, left: Plan, node: exp.Join, scope: Scope, start: int) -> Plan:
        if isinstance(node.this, exp.Lateral) or node.this.args.get("lateral"):
            raise Unsupported("LATERAL is not maintained differentially", node)
        require_only(node, {"this", "side", "kind", "on", "using"})
        middle = len(scope.entries)
        right = self._bind_source(node.this, scope)
        kind = _join_kind(node)
        if node.args.get("using"):
            return self._join_using(kind, left, right, node, scope, start, middle)
        on = node.args.get("on")
        if has_subquery(on):
            raise Unsupported("a subquery in a join condition is not maintained differentially", on)
        return join_of(kind, left, right, self.resolve(on, scope) if on is not None else exp.true())

    def _join_using(
        self, kind: JoinKind, left: Plan, right: Plan, node: exp.Join, scope: Scope, start: int, middle: int
    ) -> Plan:
        """JOIN USING: pairs of columns are equal, and one column of their common type replaces both."""
        ours, theirs = Scope(scope.entries[start:middle]), Scope(scope.entries[middle:])
        names = [identifier.name for identifier in node.args["using"]]
        pairs = [(ours.resolve(exp.column(name)), theirs.resolve(exp.column(name))) for name in names]
        condition = conjunction(self.equality(one.ref(), one.type, other.ref(), other.type) for one, other in pairs)
        join = join_of(kind, left, right, condition)
        common = self.typing.union_types([[one.type for one, _ in pairs], [other.type for _, other in pairs]])
        values = [_merged(kind, one, other, type_) for (one, other), type_ in zip(pairs, common, strict=True)]
        computed = [value for value in values if not isinstance(value, exp.Column)]
        types = iter(self.typing.types_of(join.columns, computed))
        known = {column.id: column for column in join.columns}
        merged = [
            known[value.name] if isinstance(value, exp.Column) else self.column(name, next(types))
            for name, value in zip(names, values, strict=True)
        ]
        _hide(scope, set(names), range(start, len(scope.entries)))
        scope.entries.append(Entry("", tuple(zip(names, merged, strict=True))))
        if not computed:
            return join
        passed = tuple((column, column.ref()) for column in join.columns)
        new = tuple((column, value) for column, value in zip(merged, values, strict=True) if column.id not in known)
        return Project(join, passed + new)

    def equality(
        self, left: exp.Expression, left_type: PgType, right: exp.Expression, right_type: PgType
    ) -> exp.Expression:
        """The comparison that USING or IN implies, with the casts that PostgreSQL makes written out."""
        left_cast, right_cast = self.typing.casts_for_equality(left_type, right_type)
        return exp.EQ(
            this=left.copy() if left_cast is None else cast_to(left.copy(), left_cast),
            expression=right.copy() if right_cast is None else cast_to(right.copy(), right_cast),
        )

    # -- SELECT --------------------------------------------------------------------------------------------------------

    def resolve(self, node: exp.Expression, scope: Scope) -> exp.Expression:
        """The expression with every name replaced by the id of its column."""

        def replace(item: exp.Expression) -> exp.Expression:
            if isinstance(item, exp.Column):
                return scope.resolve(item).ref()
            if isinstance(item, exp.Window):
                raise Unsupported("window functions are not maintained differentially", item)
            if isinstance(item, exp.Query):
                raise Unsupported("a scalar subquery is not maintained differentially", item)
            return item

        return node.copy().transform(replace, copy=False)

    def _bind_select(self, select: exp.Select, outer: Scope | None) -> Bound:
        require_only(select, _SELECT_PARTS)
        scope = Scope(outer=outer)
        plan = self._bind_from(select, scope)
        where = select.args.get("where")
        plan = self.apply_where(plan, conjuncts(where.this if where else None), scope)
        return self._bind_output(select, plan, scope)

    def apply_where(self, plan: Plan, parts: Sequence[exp.Expression], scope: Scope) -> Plan:
        """The plan filtered by conditions over names of the scope; subqueries in them become marks."""
        simple = []
        for part in parts:
            if has_subquery(part):
                plan, condition = lift_condition(self, plan, part, scope)
                simple.append(condition)
            else:
                simple.append(self.resolve(part, scope))
        return Filter(plan, conjunction(simple)) if simple else plan

    def _bind_output(self, select: exp.Select, plan: Plan, scope: Scope) -> Bound:
        distinct = select.args.get("distinct")
        if distinct is not None and distinct.args.get("on"):
            raise Unsupported("DISTINCT ON is not maintained differentially", distinct)
        values: list[exp.Expression] = []
        names: list[str] = []
        for item in select.expressions:
            plan, value = lift_value(self, plan, item.unalias(), scope)
            values.append(value)
            names.append(item.alias or item.output_name)
        having = select.args.get("having")
        condition = None
        if having is not None:
            if has_subquery(having):
                raise Unsupported("a subquery in HAVING is not maintained differentially", having)
            condition = self.resolve(having.this, scope)
        group = select.args.get("group")
        if group is not None or having is not None or any(self.is_aggregated(value) for value in values):
            plan, values, condition = self._aggregate(plan, group, values, condition, scope)
            if condition is not None:
                plan = Filter(plan, condition)
        types = self.typing.types_of(plan.columns, values)
        items = tuple(
            (self.column(name, type_), value) for name, type_, value in zip(names, types, values, strict=True)
        )
        plan = Project(plan, items)
        if distinct is not None:
            plan = Aggregate(plan, plan.columns, ())
        return Bound(plan, plan.columns)

    def is_aggregated(self, node: exp.Expression) -> bool:
        """Whether the expression contains an aggregate of its own query, and not only of a subquery in it."""
        return any(self._is_call(item) for item in node.walk(prune=lambda item: isinstance(item, exp.Query)))

    def _is_call(self, node: object) -> bool:
        if isinstance(node, exp.AggFunc | exp.WithinGroup):
            return True
        return isinstance(node, exp.Anonymous) and node.name.lower() in self.aggregates

    def _aggregate(
        self,
        plan: Plan,
        group: exp.Group | None,
        values: list[exp.Expression],
        having: exp.Expression | None,
        scope: Scope,
    ) -> tuple[Plan, list[exp.Expression], exp.Expression | None]:
        """Group the plan; return it with the values and HAVING expressed in the groups' columns."""
        sets = (exp.GroupingSets, exp.Cube, exp.Rollup)
        if group is not None and (group.find(*sets) or any(group.args.get(part) for part in ("totals", "all"))):
            raise Unsupported("GROUPING SETS, CUBE and ROLLUP are not maintained differentially", group)
        expressions = [self.resolve(unwrap(item), scope) for item in (group.expressions if group else [])]
        plan, keys = self._key_columns(plan, expressions)
        calls: dict[exp.Expression, Column] = {}
        by_id = {column.id: column for column in plan.columns}

        def replace(node: exp.Expression) -> exp.Expression:
            if unwrap(node) in keys:
                return keys[unwrap(node)].ref()
            call = node if self._is_call(node) or (isinstance(node, exp.Filter) and self._is_call(node.this)) else None
            if call is not None:
                if call not in calls:
                    calls[call] = self.column(call.key, self.typing.types_of(plan.columns, [call])[0])
                return calls[call].ref()
            return node

        def rewrite(node: exp.Expression) -> exp.Expression:
            replaced = replace(node)
            if replaced is not node:
                return replaced
            node = node.copy()
            for name, child in list(node.args.items()):
                if isinstance(child, exp.Expression):
                    node.set(name, rewrite(child))
                elif isinstance(child, list):
                    node.set(name, [rewrite(item) if isinstance(item, exp.Expression) else item for item in child])
            return node

        values = [rewrite(value) for value in values]
        having = rewrite(having) if having is not None else None
        # Other columns functionally depend on a key (PostgreSQL checked): making them keys too changes no group.
        grouped = {column.id: column for column in keys.values()}
        outputs = {column.id for column in calls.values()}
        for value in [*values, *([having] if having is not None else [])]:
            for id_ in sorted(used_ids(value) - outputs - set(grouped)):
                grouped[id_] = by_id[id_]
        node = Aggregate(plan, tuple(grouped.values()), tuple((column, call) for call, column in calls.items()))
        return node, values, having

    def _key_columns(
        self, plan: Plan, expressions: Sequence[exp.Expression]
    ) -> tuple[Plan, dict[exp.Expression, Column]]:
        by_id = {column.id: column for column in plan.columns}
        computed = [item for item in expressions if not isinstance(item, exp.Column)]
        types = self.typing.types_of(plan.columns, computed) if computed else []
        new = {item: self.column("group", type_) for item, type_ in zip(computed, types, strict=True)}
        if new:
            passed = tuple((column, column.ref()) for column in plan.columns)
            plan = Project(plan, passed + tuple((column, item) for item, column in new.items()))
        return plan, {item: new[item] if item in new else by_id[item.name] for item in expressions}


# The supported parts of a SELECT. ORDER BY is accepted and ignored: rows of a table have no order.
_SELECT_PARTS = frozenset({"expressions", "from_", "joins", "where", "group", "having", "distinct", "with_", "order"})


def _hide(scope: Scope, names: set[str], entries: range) -> None:
    """Hide columns merged by USING, so that they are found only by their qualified names."""
    for i in entries:
        entry = scope.entries[i]
        merged = entry.hidden | {name for name, _ in entry.columns if name in names}
        scope.entries[i] = Entry(entry.alias, entry.columns, frozenset(merged))


def _merged(kind: JoinKind, left: Column, right: Column, common: PgType) -> exp.Expression:
    """The value of a column merged by USING: from the side that always has a row, or from whichever side has one."""

    def converted(column: Column) -> exp.Expression:
        return column.ref() if column.type.oid == common.oid else cast_to(column.ref(), common.name)

    match kind:
        case "full":
            return exp.Coalesce(this=converted(left), expressions=[converted(right)])
        case "right":
            return converted(right)
        case "inner" if left.type.oid != common.oid and right.type.oid == common.oid:
            return right.ref()  # PostgreSQL prefers the side that needs no conversion
        case _:
            return converted(left)


def _join_kind(node: exp.Join) -> JoinKind:
    kinds: dict[str, JoinKind] = {"LEFT": "left", "RIGHT": "right", "FULL": "full"}
    return kinds.get(node.side, "inner")

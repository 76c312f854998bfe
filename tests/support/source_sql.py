"""Find out what a statement makes the source do beyond reading rows of one table, such as joins and grouping."""

from __future__ import annotations

import re

from sqlglot import exp, tokenize
from sqlglot.tokenizer_core import TokenType

from pgtrickle.query.dialect import parse

_COPY = re.compile(r"COPY \((?P<query>.*)\) TO STDOUT \(FORMAT csv\)", re.DOTALL)
_WORDS = {TokenType.JOIN: "JOIN", TokenType.GROUP_BY: "GROUP BY", TokenType.HAVING: "HAVING"}


def copied_query(statement: str) -> str | None:
    """The query that a statement of the fetch reads; None for other statements."""
    match = _COPY.fullmatch(statement)
    return match["query"] if match else None


def work_at_source(query: str) -> set[str]:
    """The operations of the query other than scans, filters, projections and UNION ALL."""
    # Look for keywords first, which does not depend on how well sqlglot parses the statement.
    found = {_WORDS[token.token_type] for token in tokenize(query, read="postgres") if token.token_type in _WORDS}
    tree = parse(query)
    for node in tree.walk():
        match node:
            case exp.Select():
                if len([item for item in _from_items(node) if _tables(item)]) > 1:
                    found.add("comma join")
                if node.args.get("distinct"):
                    found.add("DISTINCT")
            case exp.SetOperation():
                if type(node) is not exp.Union or node.args.get("distinct"):
                    found.add(node.key.upper())
            case exp.AggFunc() | exp.WithinGroup():
                found.add("aggregate")
            case exp.Exists() | exp.In() | exp.Any() | exp.All():
                if _tables(node):
                    found.add("subquery")
    return found


def tables_read(query: str) -> set[tuple[str, str]]:
    """The schema and name of every relation in the query."""
    return {(table.db, table.name) for table in _tables(parse(query))}


def _from_items(select: exp.Select) -> list[exp.Expression]:
    from_ = select.args.get("from_")
    return [] if from_ is None else [from_.this, *(join.this for join in select.args.get("joins") or [])]


def _tables(node: exp.Expression) -> list[exp.Table]:
    """The relations in a tree, without functions in FROM (generate_series over a weight, unnest of keys)."""
    return [table for table in node.find_all(exp.Table) if isinstance(table.this, exp.Identifier)]

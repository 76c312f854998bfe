"""Parsing of PostgreSQL's canonical text into a syntax tree that preserves its meaning."""

from __future__ import annotations

from typing import cast

import sqlglot
from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.parsers.postgres import PostgresParser

from pgtrickle.query.budget import OverBudget

MOST_CHARACTERS = 500_000  # in one text; its syntax tree takes about 600 bytes for each


class _Parser(PostgresParser):
    FUNCTIONS = {  # noqa: RUF012
        name: parse for name, parse in PostgresParser.FUNCTIONS.items() if name not in {"SUBSTR", "VARIANCE", "STDDEV"}
    }


class CanonicalPostgres(Postgres):
    """sqlglot's PostgreSQL dialect, without its translation of functions to other spellings."""

    Parser = _Parser


def parse(text: str) -> exp.Expression:
    """Return the syntax tree of one statement or expression; raises OverBudget if the text is too long."""
    if len(text) > MOST_CHARACTERS:
        raise OverBudget(f"its text has more than {MOST_CHARACTERS} characters")
    return cast(exp.Expression, sqlglot.parse_one(text, dialect=CanonicalPostgres))

"""Parsing of PostgreSQL's canonical text into a syntax tree that preserves its meaning."""

from __future__ import annotations

from typing import cast

import sqlglot
from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.parsers.postgres import PostgresParser


class _Parser(PostgresParser):
    FUNCTIONS = {  # noqa: RUF012
        name: parse for name, parse in PostgresParser.FUNCTIONS.items() if name not in {"SUBSTR", "VARIANCE", "STDDEV"}
    }


class CanonicalPostgres(Postgres):
    """sqlglot's PostgreSQL dialect, without its translation of functions to other spellings."""

    Parser = _Parser


def parse(text: str) -> exp.Expression:
    """Return the syntax tree of one statement or expression."""
    return cast(exp.Expression, sqlglot.parse_one(text, dialect=CanonicalPostgres))

"""Reading PostgreSQL's canonical text into a syntax tree that keeps what it says."""

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
    """sqlglot's PostgreSQL without translations of a function into another spelling of it."""

    Parser = _Parser


def parse(text: str) -> exp.Expression:
    """The tree of one statement or expression."""
    return cast(exp.Expression, sqlglot.parse_one(text, dialect=CanonicalPostgres))

"""A schema with operators and functions that have the names of PostgreSQL's own and record who called them."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

SHADOW_SCHEMA = "trap"

# Left type, right type, and the result.
_COMPARED = [(left, right, "true") for left in ("text", "bigint", "int", "oid") for right in ("text", "bigint", "int")]
_COUNTED = [("bigint", "int", "1"), ("bigint", "bigint", "1"), ("int", "int", "1")]
_OPERATORS = {"=": _COMPARED, "<>": _COMPARED, "<=": _COMPARED, "%": _COUNTED}
_FUNCTIONS = [
    ("txid_current", "", "bigint", "1"),
    ("to_regclass", "text", "regclass", "NULL"),
    ("pg_sequence_last_value", "regclass", "bigint", "1"),
    ("pg_stat_get_live_tuples", "oid", "bigint", "0"),
    ("current_setting", "text", "text", "NULL"),
]


def create_shadows(conn: psycopg.Connection[Any]) -> None:
    conn.execute(
        "CREATE SCHEMA trap; CREATE TABLE trap.called (by_role name, what text);"
        "GRANT USAGE ON SCHEMA trap TO PUBLIC; GRANT INSERT ON trap.called TO PUBLIC"
    )
    for number, (operator, kinds) in enumerate(_OPERATORS.items()):
        for left, right, value in kinds:
            function = f"operator_{number}"
            _function(conn, function, f"{left}, {right}", "boolean" if value == "true" else left, value, operator)
            conn.execute(
                f"CREATE OPERATOR trap.{operator} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = trap.{function})".encode()
            )
    for name, arguments, result, value in _FUNCTIONS:
        _function(conn, name, arguments, result, value, name)


def _function(conn: psycopg.Connection[Any], name: str, arguments: str, result: str, value: str, what: str) -> None:
    body = f"BEGIN INSERT INTO trap.called VALUES (current_user, {sql.quote(what)}); RETURN {value}; END"
    conn.execute(
        f"CREATE FUNCTION trap.{name}({arguments}) RETURNS {result} LANGUAGE plpgsql AS {sql.quote(body)}".encode()
    )


def shadow_calls(conn: psycopg.Connection[Any], but: str) -> list[tuple[Any, ...]]:
    """The calls by roles other than this one: role and name of the operator or function."""
    return conn.execute("SELECT by_role, what FROM trap.called WHERE by_role <> %s", (but,)).fetchall()

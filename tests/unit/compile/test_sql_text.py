"""Statements with holes."""

from __future__ import annotations

from psycopg import sql

from pgtrickle.compile.sql_text import SHARDS, SqlText, hole, ident, readable


def test_holes_are_filled_by_name() -> None:
    text = SqlText(f"SELECT 1 FROM {hole('changes_a')} WHERE {hole('key0')} AND {hole('key0')}")
    filled = text.fill(lambda name: sql.SQL("<") + sql.SQL(name) + sql.SQL(">"))
    assert filled.as_string(None) == "SELECT 1 FROM <changes_a> WHERE <key0> AND <key0>"


def test_what_a_query_contains_is_no_hole() -> None:
    text = SqlText("SELECT '⟦0123456789abcdef:key0⟧'")
    assert text.fill(lambda name: sql.SQL("filled")).as_string(None) == text.text


def test_a_reader_sees_what_holes_stand_for() -> None:
    text = f"SELECT 1 FROM {hole('changes_a')}, {hole(SHARDS + '7')} WHERE {hole('key12')}"
    assert readable(text) == (
        "SELECT 1 FROM pgtrickle_changes.changes_a WHERE (the window), (its shards here) WHERE (the keys)"
    )


def test_identifiers_are_quoted() -> None:
    assert ident('a"b') == '"a""b"'

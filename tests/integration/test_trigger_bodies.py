"""The functions that run in writers' transactions and with owners' rights, compared with golden files.

The files are written by `pytest tests/integration/test_trigger_bodies.py --update-golden`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import fresh_database

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden" / "triggers"
TABLES = """
CREATE SCHEMA shop;
CREATE TABLE shop.orders (id integer PRIMARY KEY, "it's ""new"" %" text, amount numeric(10,2), unused integer, "{hash}" date);
CREATE TABLE shop.sales (day date, amount numeric) PARTITION BY RANGE (day);
CREATE TABLE shop.sales_1 PARTITION OF shop.sales FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');
"""
CAPTURE = {
    "statement": ("shop.orders", [1, 2, 3, 5], "statement"),
    "statement_no_columns": ("shop.orders", [], "statement"),
    "statement_partitioned": ("shop.sales", [1, 2], "statement"),
    "row": ("shop.sales_1", [1, 2], "row"),
}
COLUMNS = [
    {"attnum": 1, "name": "id", "type": 23},
    {"attnum": 2, "name": 'it\'s "new" %', "type": 25},
    {"attnum": 4, "name": "{hash}", "type": 1082},
]
SHARD_CAPTURE = {
    "shards": ("distributed", False, COLUMNS),
    "shards_no_columns": ("distributed", False, []),
    "shards_partitioned": ("distributed", True, COLUMNS),
    "shards_reference": ("reference", False, COLUMNS),
    "shards_single_shard": ("single_shard", False, COLUMNS),
}


@pytest.fixture(scope="module")
def catalog(server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    """A database with a catalog and the tables; all tests only call functions that return text."""
    with (
        fresh_database(server, "trigger_bodies") as database,
        psycopg.connect(database.direct_dsn, autocommit=True) as conn,
    ):
        with pgtrickle.connect(database.dsn) as db:
            db.install()
        conn.execute(TABLES)
        yield conn


@pytest.mark.parametrize("name", CAPTURE)
def test_capture_function(catalog: psycopg.Connection, pytestconfig: pytest.Config, name: str) -> None:
    source, columns, kind = CAPTURE[name]
    body = catalog.execute(
        "SELECT pgtrickle._capture_body(c.oid, pgtrickle.stable_hash(%(source)s), %(columns)s::smallint[], %(kind)s), c.oid"
        " FROM pg_class AS c WHERE c.oid = %(source)s::regclass",
        {"source": source, "columns": columns, "kind": kind},
    ).fetchone()
    assert body is not None
    compare(pytestconfig, name, body[0].replace(str(body[1]), "<oid>"))


@pytest.mark.parametrize("name", SHARD_CAPTURE)
def test_capture_function_of_shards(catalog: psycopg.Connection, pytestconfig: pytest.Config, name: str) -> None:
    placement, partitioned, columns = SHARD_CAPTURE[name]
    definition = {
        "name": "shop.orders",
        "stable_name": "0123456789abcdef",
        "placement": placement,
        "partitioned": partitioned,
        "columns": columns,
    }
    body = catalog.execute("SELECT pgtrickle._shard_capture_body(%s::jsonb)", [json.dumps(definition)]).fetchone()
    assert body is not None
    compare(pytestconfig, name, body[0])


@pytest.mark.parametrize("kind", ["read", "write"])
def test_owner_function(catalog: psycopg.Connection, pytestconfig: pytest.Config, kind: str) -> None:
    statement = catalog.execute("SELECT pgtrickle._owner_function(7, %s)", [kind]).fetchone()
    assert statement is not None
    compare(pytestconfig, f"owner_{kind}", statement[0])


def test_every_golden_file_has_a_test() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {*CAPTURE, *SHARD_CAPTURE, "owner_read", "owner_write"}


def compare(config: pytest.Config, name: str, text: str) -> None:
    path = GOLDEN / f"{name}.sql"
    if config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()

"""Joins of many tables: the TPC-H queries that join six to eight, as stream tables with AUTO.

The tables have the columns that these queries read, filled by formulas with the proportions of TPC-H. A round of
changes inserts orders with their items and deletes as many, like RF1 and RF2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from rich.console import Console
from rich.table import Table

from bench.measure import median, seconds
from bench.server import Bench

ORDERS = 1_500_000  # at scale 1

_TABLES: Mapping[str, LiteralString] = {
    "region": "r_regionkey int PRIMARY KEY, r_name text NOT NULL",
    "nation": "n_nationkey int PRIMARY KEY, n_name text NOT NULL, n_regionkey int NOT NULL",
    "supplier": "s_suppkey int PRIMARY KEY, s_nationkey int NOT NULL",
    "customer": "c_custkey int PRIMARY KEY, c_nationkey int NOT NULL",
    "part": "p_partkey int PRIMARY KEY, p_type text NOT NULL",
    "orders": "o_orderkey int PRIMARY KEY, o_custkey int NOT NULL, o_orderdate date NOT NULL",
    "lineitem": (
        "l_orderkey int, l_linenumber int, l_partkey int NOT NULL, l_suppkey int NOT NULL,"
        " l_extendedprice numeric(12,2) NOT NULL, l_discount numeric(4,2) NOT NULL, l_shipdate date NOT NULL,"
        " PRIMARY KEY (l_orderkey, l_linenumber)"
    ),
}
_INDEXES: Sequence[LiteralString] = (
    "CREATE INDEX ON orders (o_custkey)",
    "CREATE INDEX ON lineitem (l_partkey)",
    "CREATE INDEX ON lineitem (l_suppkey)",
    "CREATE INDEX ON supplier (s_nationkey)",
    "CREATE INDEX ON customer (c_nationkey)",
)
# Numbers that look random but do not depend on the server.
_FILL: Sequence[LiteralString] = (
    "INSERT INTO region SELECT i, (ARRAY['AFRICA', 'AMERICA', 'ASIA', 'EUROPE', 'MIDDLE EAST'])[i + 1]"
    " FROM generate_series(0, 4) AS i",
    "INSERT INTO nation SELECT i, (ARRAY['ALGERIA', 'BRAZIL', 'CHINA', 'FRANCE', 'EGYPT', 'ETHIOPIA', 'CANADA', 'INDIA',"
    " 'GERMANY', 'IRAN'])[i %% 10 + 1] || CASE WHEN i < 10 THEN '' ELSE ' ' || i / 10 END, i %% 5"
    " FROM generate_series(0, 24) AS i",
    "INSERT INTO supplier SELECT i, abs(hashint4(i)) %% 25 FROM generate_series(1, %(supplier)s::int) AS i",
    "INSERT INTO customer SELECT i, abs(hashint4(i + 7)) %% 25 FROM generate_series(1, %(customer)s::int) AS i",
    "INSERT INTO part SELECT i, (ARRAY['ECONOMY', 'STANDARD', 'PROMO', 'SMALL', 'LARGE'])[abs(hashint4(i)) %% 5 + 1] || ' '"
    " || (ARRAY['ANODIZED', 'PLATED', 'BRUSHED', 'POLISHED', 'BURNISHED'])[abs(hashint4(i + 1)) %% 5 + 1] || ' '"
    " || (ARRAY['STEEL', 'TIN', 'COPPER', 'BRASS', 'NICKEL'])[abs(hashint4(i + 2)) %% 5 + 1]"
    " FROM generate_series(1, %(part)s::int) AS i",
)
_ORDERS: LiteralString = (
    "INSERT INTO orders SELECT i, abs(hashint4(i + 3)) %% %(customer)s + 1, date '1992-01-01' + abs(hashint4(i + 4)) %% 2405"
    " FROM generate_series(%(first)s::int, %(last)s::int) AS i"
)
_ITEMS: LiteralString = (
    "INSERT INTO lineitem SELECT i, n, abs(hashint4(i * 7 + n)) %% %(part)s + 1,"
    " abs(hashint4(i * 7 + n + 5)) %% %(supplier)s + 1, (abs(hashint4(i + n * 11)) %% 10000000 + 90000) / 100.0,"
    " abs(hashint4(i + n)) %% 11 / 100.0,"
    " date '1992-01-01' + abs(hashint4(i + 4)) %% 2405 + abs(hashint4(i + n + 1)) %% 121 + 1"
    " FROM generate_series(%(first)s::int, %(last)s::int) AS i, generate_series(1, abs(hashint4(i + 6)) %% 7 + 1) AS n"
)

QUERIES: Mapping[str, LiteralString] = {
    "q5": (
        "SELECT n_name, sum(l_extendedprice * (1 - l_discount)) AS revenue"
        " FROM customer, orders, lineitem, supplier, nation, region"
        " WHERE c_custkey = o_custkey AND l_orderkey = o_orderkey AND l_suppkey = s_suppkey AND c_nationkey = s_nationkey"
        " AND s_nationkey = n_nationkey AND n_regionkey = r_regionkey AND r_name = 'ASIA'"
        " AND o_orderdate >= date '1994-01-01' AND o_orderdate < date '1995-01-01' GROUP BY n_name"
    ),
    "q7": (
        "SELECT supp_nation, cust_nation, l_year, sum(volume) AS revenue FROM (SELECT n1.n_name AS supp_nation,"
        " n2.n_name AS cust_nation, extract(year FROM l_shipdate) AS l_year, l_extendedprice * (1 - l_discount) AS volume"
        " FROM supplier, lineitem, orders, customer, nation n1, nation n2"
        " WHERE s_suppkey = l_suppkey AND o_orderkey = l_orderkey AND c_custkey = o_custkey"
        " AND s_nationkey = n1.n_nationkey AND c_nationkey = n2.n_nationkey"
        " AND ((n1.n_name = 'FRANCE' AND n2.n_name = 'GERMANY') OR (n1.n_name = 'GERMANY' AND n2.n_name = 'FRANCE'))"
        " AND l_shipdate BETWEEN date '1995-01-01' AND date '1996-12-31') AS shipping"
        " GROUP BY supp_nation, cust_nation, l_year"
    ),
    "q8": (
        "SELECT o_year, sum(CASE WHEN nation = 'BRAZIL' THEN volume ELSE 0 END) AS brazil, sum(volume) AS volume"
        " FROM (SELECT extract(year FROM o_orderdate) AS o_year, l_extendedprice * (1 - l_discount) AS volume,"
        " n2.n_name AS nation FROM part, supplier, lineitem, orders, customer, nation n1, nation n2, region"
        " WHERE p_partkey = l_partkey AND s_suppkey = l_suppkey AND l_orderkey = o_orderkey AND o_custkey = c_custkey"
        " AND c_nationkey = n1.n_nationkey AND n1.n_regionkey = r_regionkey AND r_name = 'AMERICA'"
        " AND s_nationkey = n2.n_nationkey AND o_orderdate BETWEEN date '1995-01-01' AND date '1996-12-31'"
        " AND p_type = 'ECONOMY ANODIZED STEEL') AS all_nations GROUP BY o_year"
    ),
}


@dataclass
class Figures:
    """What one query took."""

    query: float
    created: float
    first: float  # the first refresh, which plans
    refreshes: list[float] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    exact: bool = True


def run(
    bench: Bench, scale: float, share: float, rounds: int, say: Callable[[str], None], queries: Sequence[str] = ()
) -> dict[str, Figures]:
    """Create the tables and a stream table per query; measure each query beside its refreshes."""
    sizes = {
        "supplier": round(10_000 * scale),
        "customer": round(150_000 * scale),
        "part": round(200_000 * scale),
    }
    conn = bench.conn
    orders = round(ORDERS * scale)
    say(f"fill {orders} orders")
    _fill(conn, sizes, orders)
    found: dict[str, Figures] = {}
    for name in queries or tuple(QUERIES):
        text = QUERIES[name]
        say(f"create {name}")
        took = median([seconds(partial(_rows, conn, text)) for _ in range(5)])
        created = seconds(partial(bench.db.create_stream_table, name, text))
        found[name] = Figures(took, created, 0)
    count = max(round(orders * share), 1)
    for i in range(rounds + 1):
        _change(conn, sizes, orders + i * count + 1, i * count + 1, count)
        for name, figures in found.items():
            say(f"round {i}: {name}")
            started = time.perf_counter()
            (result,) = bench.db.refresh(name)
            took = time.perf_counter() - started
            figures.actions.append(result.action)
            if i:
                figures.refreshes.append(took)
            else:
                figures.first = took
            figures.exact &= _is_exact(conn, name)
    return found


def _fill(conn: psycopg.Connection[Any], sizes: Mapping[str, int], orders: int) -> None:
    for name, columns in _TABLES.items():
        conn.execute(sql.SQL("CREATE TABLE {} ({})").format(sql.Identifier(name), sql.SQL(columns)))
    for statement in (*_FILL, _ORDERS, _ITEMS):
        conn.execute(statement, {**sizes, "first": 1, "last": orders})
    for statement in _INDEXES:
        conn.execute(statement)
    conn.execute("ANALYZE")


def _change(conn: psycopg.Connection[Any], sizes: Mapping[str, int], new: int, old: int, count: int) -> None:
    """So many orders with their items are inserted, and as many old ones deleted."""
    with conn.transaction():
        for statement in (_ORDERS, _ITEMS):
            conn.execute(statement, {**sizes, "first": new, "last": new + count - 1})
        conn.execute("DELETE FROM lineitem WHERE l_orderkey BETWEEN %s AND %s", (old, old + count - 1))
        conn.execute("DELETE FROM orders WHERE o_orderkey BETWEEN %s AND %s", (old, old + count - 1))


def _rows(conn: psycopg.Connection[Any], text: LiteralString) -> list[tuple[Any, ...]]:
    return conn.execute(text).fetchall()


def _is_exact(conn: psycopg.Connection[Any], name: str) -> bool:
    wanted = conn.execute(QUERIES[name])
    assert wanted.description is not None
    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in wanted.description)
    stored = conn.execute(sql.SQL("SELECT {} FROM {}").format(columns, sql.Identifier(name)))
    return sorted(map(str, stored.fetchall())) == sorted(map(str, wanted.fetchall()))


def show(console: Console, figures: Mapping[str, Figures]) -> None:
    table = Table("query", "the query", "creation", "first refresh", "later refreshes", "actions", "exact")
    for name, found in figures.items():
        table.add_row(
            name,
            f"{1000 * found.query:.0f} ms",
            f"{1000 * found.created:.0f} ms",
            f"{1000 * found.first:.0f} ms",
            f"{1000 * median(found.refreshes):.0f} ms",
            ", ".join(sorted(set(found.actions))),
            "yes" if found.exact else "NO",
        )
    console.print(table)

"""The SQL API: creating, changing and dropping stream tables, as ordinary roles with only their own rights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.catalog.install import install
from tests.support.database import TestDatabase

pytestmark = pytest.mark.pgversions

Connection = psycopg.Connection[Any]


def one(conn: Connection, query: str, parameters: list[Any] | None = None) -> tuple[Any, ...]:
    row = conn.execute(query, parameters).fetchone()
    assert row is not None
    return tuple(row)


def create(conn: Connection, name: str, query: str, **options: Any) -> int:
    arguments = "".join(f", {option} => %({option})s" for option in options)
    row = conn.execute(
        f"SELECT pgtrickle.create_stream_table(%(name)s, %(query)s{arguments})",
        {"name": name, "query": query, **options},
    ).fetchone()
    assert row is not None
    return int(row[0])


def catalog_is_empty(conn: Connection) -> bool:
    left = one(
        conn,
        "SELECT (SELECT count(*) FROM pgtrickle.pgt_stream_tables), (SELECT count(*) FROM pgtrickle.pgt_dependencies),"
        " (SELECT count(*) FROM pgtrickle.pgt_change_tracking),"
        " (SELECT count(*) FROM pg_class WHERE relnamespace = 'pgtrickle_views'::regnamespace),"
        " (SELECT count(*) FROM pg_proc WHERE pronamespace = 'pgtrickle_views'::regnamespace),"
        " (SELECT count(*) FROM pg_class WHERE relnamespace = 'pgtrickle_changes'::regnamespace AND relname ~ '^changes_')",
    )
    return left == (0,) * 6


@pytest.fixture
def shop(conn: Connection) -> Connection:
    """One role for everything, and two tables."""
    install(conn)
    conn.execute("CREATE SCHEMA shop")
    conn.execute("SET search_path = shop")
    conn.execute('CREATE TABLE orders (id int PRIMARY KEY, customer int, amount numeric(10,2), note text COLLATE "C")')
    conn.execute("CREATE TABLE customers (id int PRIMARY KEY, name text)")
    return conn


@dataclass(frozen=True)
class Roles:
    """Four ordinary roles: the installing role, two owners, and the service's login."""

    database: TestDatabase
    installer: Connection
    alice: Connection
    bob: Connection
    service: Connection


@pytest.fixture
def roles(database: TestDatabase, conn: Connection) -> Iterator[Roles]:
    names = {name: database.create_role(name) for name in ("installer", "alice", "bob", "service")}
    for name in ("installer", "alice", "bob"):
        conn.execute(f"GRANT CREATE ON DATABASE {database.name} TO {names[name]}")
    with (
        psycopg.connect(database.direct_dsn_as(names["installer"]), autocommit=True) as installer,
        psycopg.connect(database.direct_dsn_as(names["alice"]), autocommit=True) as alice,
        psycopg.connect(database.direct_dsn_as(names["bob"]), autocommit=True) as bob,
        psycopg.connect(database.direct_dsn_as(names["service"]), autocommit=True) as service,
    ):
        install(installer, service_role=names["service"])
        for owner, schema in ((alice, "alice"), (bob, "bob")):
            owner.execute(
                f"CREATE SCHEMA {schema}; SET search_path = {schema}; CREATE TABLE t (a int PRIMARY KEY, secret text)"
            )
            owner.execute("INSERT INTO t VALUES (1, 'x')")
        yield Roles(database, installer, alice, bob, service)


def test_creation_creates_view_table_guard_and_capture(shop: Connection) -> None:
    pgt_id = create(
        shop, "totals", "SELECT customer, sum(amount) AS total, min(note) AS n FROM orders GROUP BY customer",
        schedule="30s", key_columns=["customer"],
    )  # fmt: skip
    row = one(
        shop,
        "SELECT pgt_schema, pgt_name, pgt_relid::text, view_relid::text, schedule, refresh_mode, status, reinit_reason,"
        " key_columns, session_settings ->> 'search_path' FROM pgtrickle.pgt_stream_tables WHERE pgt_id = %s",
        [pgt_id],
    )
    assert row == (
        "shop", "totals", "totals", f"pgtrickle_views.q_{pgt_id}", "30s", "AUTO", "INITIALIZING", "initial population",
        ["customer"], "shop",
    )  # fmt: skip
    assert one(shop, "SELECT source_relid::text, source_type, columns_used FROM pgtrickle.pgt_dependencies") == (
        "orders", "TABLE", [2, 3, 4],
    )  # fmt: skip
    columns = shop.execute(
        "SELECT attname, format_type(atttypid, atttypmod), attcollation::regcollation::text FROM pg_attribute"
        " WHERE attrelid = 'totals'::regclass AND attnum > 0 ORDER BY attnum"
    ).fetchall()
    assert columns == [("customer", "integer", "-"), ("total", "numeric", "-"), ("n", "text", '"C"')]
    (index,) = one(shop, "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = 'totals'::regclass")
    assert "UNIQUE" in index
    assert "NULLS NOT DISTINCT" in index
    assert one(shop, "SELECT count(*) FROM pgtrickle.pgt_requests WHERE pgt_id = %s", [pgt_id]) == (1,)


def test_without_a_key_rows_get_an_id(shop: Connection) -> None:
    create(shop, "notes", "SELECT note FROM orders", initialize=False)
    assert one(
        shop,
        "SELECT attname, atttypid::regtype::text, attnotnull FROM pg_attribute"
        " WHERE attrelid = 'notes'::regclass AND attnum = 2",
    ) == ("__pgt_row_id", "uuid", True)
    assert one(shop, "SELECT indisunique FROM pg_index WHERE indrelid = 'notes'::regclass") == (False,)
    assert one(shop, "SELECT count(*) FROM pgtrickle.pgt_requests") == (0,)


KEYS: list[tuple[str, list[str] | None]] = [
    ("SELECT id, note FROM orders WHERE amount > 1", ["id"]),
    ("SELECT note, id AS number FROM orders ORDER BY amount", ["number"]),
    ("SELECT * FROM orders", ["id"]),
    ("SELECT customer, count(*) AS n FROM orders GROUP BY customer HAVING count(*) > 1", ["customer"]),
    (
        "SELECT o.note, p.customer, max(o.id) AS last FROM orders o JOIN orders p USING (id) GROUP BY p.customer, o.note",
        ["note", "customer"],
    ),
    ("SELECT count(*) AS n FROM orders", []),
    ("SELECT id, now() AS at FROM orders", ["id"]),  # though it runs as FULL
    # Not beyond doubt
    ("SELECT note FROM orders", None),
    ("SELECT id + 0 AS id FROM orders", None),
    ("SELECT id, id AS again FROM orders", None),
    ("SELECT customer, customer AS again, count(*) AS n FROM orders GROUP BY customer", None),
    ("SELECT count(*) AS n FROM orders GROUP BY customer", None),
    ("SELECT note || 'x' AS x, count(*) AS n FROM orders GROUP BY 1", None),
    ("SELECT o.id FROM orders o JOIN orders p ON p.id > o.id", None),
    ("SELECT o.id FROM orders o, orders p", None),
    ("SELECT id FROM orders UNION ALL SELECT id FROM orders", None),
    ("SELECT id FROM (SELECT id FROM orders UNION ALL SELECT 1) AS u", None),
    ("SELECT id, generate_series(1, 2) AS n FROM orders", None),
    ("SELECT customer, count(*) AS n FROM orders GROUP BY ROLLUP (customer)", None),
    ("WITH o AS (SELECT id FROM orders) SELECT id FROM o", None),
    ("SELECT DISTINCT customer FROM orders", None),
    ("SELECT id FROM orders LIMIT 3", None),
]


def test_sql_finds_unambiguous_keys(database: TestDatabase, shop: Connection) -> None:
    found = {}
    with pgtrickle.connect(database.direct_dsn) as python:
        python.conn.execute("SET search_path = shop")
        for number, (query, key) in enumerate(KEYS):
            id_ = create(shop, f"found_{number}", query, initialize=False)
            found[query] = one(shop, "SELECT key_columns FROM pgtrickle.pgt_stream_tables WHERE pgt_id = %s", [id_])[0]
            if key is not None:
                assert python._compile(query, None)[1] == key, query
    assert found == dict(KEYS)


def test_a_replaced_query_keeps_the_key_that_was_found(shop: Connection) -> None:
    replace = "SELECT pgtrickle.create_or_replace_stream_table('found', %s)"
    for query in ("SELECT id, note FROM orders", "SELECT id, note FROM orders WHERE id > 1"):
        shop.execute(replace, (query,))
        assert one(shop, "SELECT defining_query, key_columns FROM pgtrickle.pgt_stream_tables") == (query, ["id"])
    with pytest.raises(psycopg.errors.InvalidTableDefinition, match=r"has a different key: none instead of \{id\}"):
        shop.execute(replace, ("SELECT id + 0 AS id, note FROM orders",))


def test_selecting_all_columns_of_a_stream_table_excludes_its_row_ids(database: TestDatabase, shop: Connection) -> None:
    create(shop, "notes", "SELECT note, amount FROM orders", initialize=False)
    id_ = create(shop, "stacked", "SELECT * FROM notes WHERE amount > 1 ; ", initialize=False)
    columns = (
        "SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
    )
    assert one(shop, columns, [f"pgtrickle_views.q_{id_}"]) == (["note", "amount"],)
    shop.execute("SELECT pgtrickle.alter_stream_table('stacked', query => 'SELECT * FROM notes')")
    assert one(shop, columns, [f"pgtrickle_views.q_{id_}"]) == (["note", "amount"],)
    with pgtrickle.connect(database.direct_dsn) as python:
        made = python.create_stream_table("shop.by_python", "SELECT * FROM shop.notes", initialize=False)
        assert made.effective_mode == "DIFFERENTIAL"
    assert one(shop, columns, ["by_python"]) == (["note", "amount", "__pgt_row_id"],)
    with pytest.raises(psycopg.errors.ReservedName, match="column name __pgt_row_id is reserved"):
        create(shop, "named", "SELECT __pgt_row_id, note FROM notes")
    with pytest.raises(psycopg.errors.DuplicateColumn) as raised:
        create(shop, "both", "SELECT a.*, b.* FROM notes AS a CROSS JOIN notes AS b (x, y)")
    assert raised.value.diag.message_hint == "Name the columns of the stream tables instead of *."
    with pytest.raises(psycopg.errors.SyntaxError):
        create(shop, "several", "SELECT * FROM notes; DROP TABLE orders")
    shop.execute("SELECT FROM orders")


def test_unsuitable_or_costly_queries_are_reported_at_creation(
    database: TestDatabase, shop: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(psycopg.errors.InvalidTableDefinition, match="the query returns no columns"):
        create(shop, "empty", "SELECT FROM orders")
    heard: list[str | None] = []
    shop.add_notice_handler(lambda notice: heard.append(notice.message_primary))
    create(shop, "plain", "SELECT id, note FROM orders")
    assert not [told for told in heard if "current time" in str(told)]
    create(shop, "timed", "SELECT id, note FROM orders WHERE now() > '2020-01-01'")
    query = "SELECT id, note FROM orders WHERE current_date > '2020-01-01'"
    shop.execute("SELECT pgtrickle.alter_stream_table('plain', query => %s)", (query,))
    assert len([told for told in heard if "current time" in str(told)]) == 2
    with pgtrickle.connect(database.direct_dsn) as python:
        python.create_stream_table("shop.logged", "SELECT id, now() AS at FROM shop.orders", initialize=False)
    assert "depends on the current time" in caplog.text


def test_a_result_of_one_row_has_an_empty_key(shop: Connection) -> None:
    create(shop, "one", "SELECT count(*) AS n FROM orders", key_columns=[])
    assert one(shop, "SELECT key_columns, columns_used FROM pgtrickle.pgt_stream_tables JOIN pgtrickle.pgt_dependencies"
               " USING (pgt_id)") == ([], [])  # fmt: skip
    assert one(shop, "SELECT indisunique FROM pg_index WHERE indrelid = 'one'::regclass") == (True,)


def test_sources_are_found_through_views_whole_rows_and_stream_tables(shop: Connection) -> None:
    shop.execute(
        "CREATE VIEW inner_view AS SELECT id, amount FROM orders; CREATE VIEW outer_view AS SELECT id FROM inner_view"
    )
    shop.execute("CREATE MATERIALIZED VIEW mv AS SELECT 1 AS x")
    create(shop, "a", "SELECT v.id, c FROM outer_view v JOIN customers c USING (id)")
    create(shop, "b", "SELECT id FROM a WHERE EXISTS (SELECT FROM mv)")
    found = shop.execute(
        "SELECT s.pgt_name, d.source_name, d.source_type, d.columns_used FROM pgtrickle.pgt_dependencies d"
        " JOIN pgtrickle.pgt_stream_tables s USING (pgt_id) ORDER BY 1, 2"
    ).fetchall()
    assert found == [
        ("a", "customers", "TABLE", [1, 2]),
        ("a", "orders", "TABLE", [1, 3]),
        ("b", "a", "STREAM_TABLE", [1]),
        ("b", "mv", "MATVIEW", []),
    ]


REFUSED = {
    "syntax": ("x", "SELEC 1", "42601", "syntax error"),
    "nothing": ("x", "  ", "42601", "one query"),
    "two queries": ("x", "SELECT 1 AS a; SELECT 2 AS b", "42601", "one query"),
    "not a query": ("x", "DELETE FROM orders RETURNING id", "42601", "syntax error"),
    "smuggled": ("x", "SELECT 1) q; DROP TABLE customers; SELECT * FROM (SELECT 1", "42601", "syntax error"),
    "unknown table": ("x", "SELECT * FROM nowhere", "42P01", "nowhere"),
    "duplicate columns": ("x", "SELECT id, id FROM orders", "42701", "different names"),
    "unnamed columns": ("x", "SELECT 1, 2", "42701", "different names"),
    "reserved column": ("x", "SELECT 1 AS __pgt_w", "42939", "__pgt_w"),
    "reserved name": ("__pgt_x", "SELECT 1 AS a", "42939", "reserved"),
    "reserved schema": ("pgtrickle.x", "SELECT 1 AS a", "42939", "reserved"),
    "not a name": ("a b", "SELECT 1 AS a", "42602", "valid name"),
    "three parts": ("a.b.c", "SELECT 1 AS a", "42602", "schema"),
    "long name": ("x" * 64, "SELECT 1 AS a", "42622", "63 bytes"),
    "unknown schema": ("nowhere.x", "SELECT 1 AS a", "3F000", "nowhere"),
    "taken name": ("orders", "SELECT 1 AS a", "42P07", "already exists"),
    "volatile": ("x", "SELECT random() AS r FROM orders", "0A000", "random"),
    "volatile in a view": ("x", "SELECT * FROM rolls", "0A000", "random"),
    "sample": ("x", "SELECT id FROM orders TABLESAMPLE BERNOULLI (10)", "0A000", "bernoulli"),
    "locking": ("x", "SELECT id FROM orders FOR UPDATE", "0A000", "locks rows"),
    "system catalog": ("x", "SELECT relname FROM pg_class", "0A000", "pg_class"),
    "behind a system view": ("x", "SELECT tablename FROM pg_tables", "0A000", "system table"),
    "own catalog": ("x", "SELECT pgt_name FROM pgtrickle.pgt_stream_tables", "0A000", "system table"),
    "temporary": ("x", "SELECT * FROM temporary", "0A000", "temporary table"),
    "sequence": ("x", "SELECT last_value FROM numbers", "42809", "not a table"),
}


@pytest.mark.parametrize(("name", "query", "sqlstate", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refused_creations_leave_nothing_behind(
    shop: Connection, name: str, query: str, sqlstate: str, message: str
) -> None:
    shop.execute(
        "CREATE VIEW rolls AS SELECT random() AS r; CREATE SEQUENCE numbers; CREATE TEMP TABLE temporary (a int)"
    )
    with pytest.raises(psycopg.Error, match=message) as caught:
        create(shop, name, query)
    assert caught.value.sqlstate == sqlstate
    assert one(shop, "SELECT to_regclass('customers') IS NOT NULL") == (True,)
    assert catalog_is_empty(shop)


@pytest.mark.parametrize(
    "options",
    [{"schedule": "often"}, {"refresh_mode": "SOMETIMES"}, {"placement": "moon"}, {"key_columns": ["nope"]}],
)
def test_refused_options(shop: Connection, options: dict[str, Any]) -> None:
    with pytest.raises(psycopg.Error) as caught:
        create(shop, "x", "SELECT id FROM orders", **options)
    assert caught.value.diag.message_hint
    assert catalog_is_empty(shop)


@pytest.mark.parametrize("schedule", ["calculated", "1s", "1h30m", "@hourly", "*/5 * * * *", "0 9 * * 1-5"])
def test_schedules(shop: Connection, schedule: str) -> None:
    create(shop, "x", "SELECT id FROM orders", schedule=schedule)


def test_quoted_and_unicode_names(shop: Connection) -> None:
    shop.execute('CREATE SCHEMA "Sché ma"')
    create(shop, '"Sché ma"."Tä""ble"', 'SELECT id AS "Größe", note AS "a b" FROM orders')
    assert one(shop, "SELECT pgt_schema, pgt_name FROM pgtrickle.pgt_status()") == ("Sché ma", 'Tä"ble')
    shop.execute("SELECT pgtrickle.drop_stream_table(%s)", ['"Sché ma"."Tä""ble"'])
    assert catalog_is_empty(shop)


def test_creation_rolls_back_with_its_transaction(shop: Connection) -> None:
    with shop.transaction(force_rollback=True):
        create(shop, "x", "SELECT id FROM orders")
    assert catalog_is_empty(shop)
    assert one(shop, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'orders'::regclass AND NOT tgisinternal") == (0,)


def test_direct_changes_are_refused_even_to_the_owner(shop: Connection) -> None:
    pgt_id = create(shop, "x", "SELECT id FROM orders", key_columns=["id"])
    for statement in ("INSERT INTO x VALUES (1)", "UPDATE x SET id = 1", "DELETE FROM x", "TRUNCATE x"):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=r"shop\.x cannot be changed directly"):
            shop.execute(statement)
    # What the service does in its apply.
    with shop.transaction():
        shop.execute(
            "UPDATE pgtrickle.pgt_stream_tables SET apply_xid = pg_current_xact_id() WHERE pgt_id = %s", [pgt_id]
        )
        shop.execute("INSERT INTO x VALUES (1)")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        shop.execute("DELETE FROM x")


def test_if_not_exists_and_or_replace(shop: Connection) -> None:
    query = "SELECT id, amount FROM orders"
    first = create(shop, "x", query)
    again = "SELECT pgtrickle.create_stream_table_if_not_exists('x', 'SELECT 1 AS other')"
    assert one(shop, again) == (first,)
    replace = "SELECT pgtrickle.create_or_replace_stream_table('x', %s, schedule => %s)"
    before = one(shop, "SELECT s FROM pgtrickle.pgt_stream_tables s")
    assert one(shop, replace, [query, "calculated"]) == (first,)
    assert one(shop, "SELECT s FROM pgtrickle.pgt_stream_tables s") == before
    assert one(shop, replace, [query, "5m"]) == (first,)
    assert one(shop, "SELECT schedule, defining_query FROM pgtrickle.pgt_stream_tables") == ("5m", query)


def test_another_query_with_the_same_columns_keeps_the_table(shop: Connection, database: TestDatabase) -> None:
    pgt_id = create(shop, "x", "SELECT id, amount FROM orders", key_columns=["id"])
    reader = database.create_role("reader")
    shop.execute(f"CREATE INDEX mine ON x (amount); GRANT SELECT ON x TO {reader}; COMMENT ON TABLE x IS 'mine'")
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET frontier = '{}', reinit_reason = NULL, status = 'ACTIVE'")
    shop.execute(
        "SELECT pgtrickle.alter_stream_table('x', query =>"
        " 'SELECT o.id, o.amount FROM orders o JOIN customers c ON c.id = o.customer WHERE c.name = ''x''')"
    )
    assert one(shop, "SELECT pgt_id, reinit_reason, status FROM pgtrickle.pgt_stream_tables") == (
        pgt_id, "query changed", "ACTIVE",
    )  # fmt: skip
    assert one(
        shop,
        "SELECT to_regclass('mine') IS NOT NULL, has_table_privilege(%s, 'x', 'SELECT'), obj_description('x'::regclass)",
        [reader],
    ) == (True, True, "mine")
    sources = shop.execute("SELECT source_name, columns_used FROM pgtrickle.pgt_dependencies ORDER BY 1").fetchall()
    assert sources == [("customers", [1, 2]), ("orders", [1, 2, 3])]
    with pytest.raises(psycopg.errors.InvalidTableDefinition, match="different columns"):
        shop.execute("SELECT pgtrickle.alter_stream_table('x', query => 'SELECT id FROM orders')")
    assert one(shop, "SELECT pg_get_viewdef(view_relid) ~ 'customers' FROM pgtrickle.pgt_stream_tables") == (True,)


def test_a_stream_table_cannot_read_itself(shop: Connection) -> None:
    create(shop, "x", "SELECT id FROM orders")
    create(shop, "y", "SELECT id FROM x")
    with pytest.raises(psycopg.errors.InvalidObjectDefinition, match="read itself"):
        shop.execute("SELECT pgtrickle.alter_stream_table('x', query => 'SELECT id FROM y')")


def test_alter_changes_options_and_status(shop: Connection) -> None:
    create(shop, "x", "SELECT id FROM orders")
    shop.execute(
        "SELECT pgtrickle.alter_stream_table('x', schedule => '1m', refresh_mode => 'full', status => 'SUSPENDED',"
        " placement => 'spark', pooler_compatibility_mode => true)"
    )
    options = (
        "SELECT schedule, refresh_mode, status, placement, pooler_compatibility_mode FROM pgtrickle.pgt_stream_tables"
    )
    assert one(shop, options) == ("1m", "FULL", "SUSPENDED", "spark", True)
    shop.execute("SELECT pgtrickle.alter_stream_table('x', status => 'active')")
    assert one(shop, options) == ("1m", "FULL", "INITIALIZING", "spark", True)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="ERROR"):
        shop.execute("SELECT pgtrickle.alter_stream_table('x', status => 'ERROR')")
    with pytest.raises(psycopg.errors.UndefinedTable, match="no stream table y"):
        shop.execute("SELECT pgtrickle.alter_stream_table('y', schedule => '1m')")


def test_drop_removes_everything(shop: Connection) -> None:
    create(shop, "x", "SELECT id FROM orders")
    create(shop, "y", "SELECT id FROM x")
    with pytest.raises(psycopg.errors.DependentObjectsStillExist, match=r"shop\.y"):
        shop.execute("SELECT pgtrickle.drop_stream_table('x')")
    shop.execute("SELECT pgtrickle.drop_stream_table('x', cascade => true)")
    assert catalog_is_empty(shop)
    shop.execute("INSERT INTO orders VALUES (1, 1, 1, 'x')")


def test_a_table_dropped_by_hand_is_forgotten(shop: Connection) -> None:
    create(shop, "x", "SELECT id FROM orders")
    shop.execute("DROP TABLE x")
    shop.execute("SELECT pgtrickle.drop_stream_table('x')")
    assert catalog_is_empty(shop)
    create(shop, "x", "SELECT id FROM orders")
    shop.execute("DROP TABLE x")
    create(shop, "x", "SELECT id FROM orders")
    assert one(shop, "SELECT count(*) FROM pgtrickle.pgt_stream_tables") == (1,)


def test_a_source_dropped_with_cascade_can_be_cleared_away(shop: Connection) -> None:
    pgt_id = create(shop, "x", "SELECT id FROM orders")
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        shop.execute("DROP TABLE orders")
    shop.execute("DROP TABLE orders CASCADE")
    assert "view was dropped" in one(shop, "SELECT pgtrickle._ownership_problem(%s)", [pgt_id])[0]
    shop.execute("SELECT pgtrickle.drop_stream_table('x')")
    assert catalog_is_empty(shop)


def test_a_renamed_stream_table_is_found_by_its_new_name(shop: Connection) -> None:
    create(shop, "x", "SELECT id FROM orders")
    shop.execute("ALTER TABLE x RENAME TO z")
    assert one(shop, "SELECT pgt_name FROM pgtrickle.pgt_status()") == ("z",)
    with pytest.raises(psycopg.errors.UndefinedTable):
        shop.execute("SELECT pgtrickle.drop_stream_table('x')")
    shop.execute("SELECT pgtrickle.drop_stream_table('z')")
    assert catalog_is_empty(shop)


def test_an_exported_definition_creates_the_same(shop: Connection) -> None:
    query = 'SELECT customer, max(note) AS "it\'s" FROM orders GROUP BY customer'
    create(shop, '"X y"', query, schedule="5m", key_columns=["customer"], placement="spark")
    described = (
        "SELECT pgt_schema, pgt_name, defining_query, schedule, refresh_mode, placement, key_columns, session_settings"
        " FROM pgtrickle.pgt_stream_tables"
    )
    before = one(shop, described)
    (definition,) = one(shop, "SELECT pgtrickle.export_definition('\"X y\"')")
    shop.execute("SELECT pgtrickle.drop_stream_table('\"X y\"')")
    shop.execute("SET search_path = public")
    shop.execute(definition)
    assert one(shop, described) == before


def test_the_second_of_two_drops_names_the_stream_table(shop: Connection) -> None:
    pgt_id = create(shop, "x", "SELECT id FROM orders", initialize=False)
    shop.execute("SELECT pgtrickle.drop_stream_table('x')")
    # Its name was looked up before the other transaction committed.
    with pytest.raises(psycopg.errors.UndefinedObject, match="stream table x was dropped by another transaction"):
        shop.execute("SELECT pgtrickle._drop(%s, false, 'x')", [pgt_id])


def test_requests_and_the_warning_without_a_service(shop: Connection) -> None:
    notices: list[str] = []
    shop.add_notice_handler(lambda diagnostic: notices.append(str(diagnostic.message_primary)))
    pgt_id = create(shop, "x", "SELECT id FROM orders", initialize=False)
    (first,) = one(shop, "SELECT pgtrickle.refresh_stream_table('x')")
    (second,) = one(shop, "SELECT pgtrickle.manual_refresh(stream_table_name => 'x')")
    assert [notice for notice in notices if "no pgtrickle service" in notice] == notices
    assert len(notices) == 3
    found = shop.execute(
        "SELECT request_id, pgt_id, status, requested_by FROM pgtrickle.pgt_requests ORDER BY 1"
    ).fetchall()
    assert found == [(first, pgt_id, "PENDING", "app"), (second, pgt_id, "PENDING", "app")]
    shop.execute("INSERT INTO pgtrickle.pgt_services VALUES (gen_random_uuid(), 'here', 1, 'test')")
    shop.execute("SELECT pgtrickle.refresh_stream_table('x')")
    assert len(notices) == 3


@pytest.mark.parametrize(("status", "error"), [("DONE", None), ("FAILED", "the disk is full")])
def test_refresh_and_wait(shop: Connection, database: TestDatabase, status: str, error: str | None) -> None:
    create(shop, "x", "SELECT id FROM orders", initialize=False)

    def serve() -> None:
        with psycopg.connect(database.direct_dsn, autocommit=True) as service:
            while not service.execute(
                "UPDATE pgtrickle.pgt_requests SET status = %s, error = %s WHERE status = 'PENDING'", [status, error]
            ).rowcount:
                service.execute("SELECT pg_sleep(0.005)")

    server = threading.Thread(target=serve)
    server.start()
    try:
        if error is None:
            shop.execute("CALL pgtrickle.refresh_and_wait('x')")
        else:
            with pytest.raises(psycopg.Error, match=error):
                shop.execute("CALL pgtrickle.refresh_and_wait('x', '30 seconds')")
    finally:
        server.join()


def test_refresh_and_wait_gives_up(shop: Connection) -> None:
    create(shop, "x", "SELECT id FROM orders", initialize=False)
    with pytest.raises(psycopg.errors.QueryCanceled, match="did not finish within"):
        shop.execute("CALL pgtrickle.refresh_and_wait('x', '50 milliseconds')")


def test_status_history_staleness(shop: Connection) -> None:
    pgt_id = create(shop, "x", "SELECT id FROM orders")
    assert one(shop, "SELECT pgtrickle.get_staleness('x')") == (None,)
    shop.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET data_timestamp = clock_timestamp() - interval '90 s',"
        " effective_mode = 'FULL', mode_reason = 'because'"
    )
    shop.execute(
        "INSERT INTO pgtrickle.pgt_refresh_history (pgt_id, pgt_schema, pgt_name, end_time, status, action)"
        " SELECT %s, 'shop', 'x', now(), 'COMPLETED', 'FULL' FROM generate_series(1, 5)",
        [pgt_id],
    )
    assert 90 <= one(shop, "SELECT pgtrickle.get_staleness('x')")[0] < 100
    assert one(shop, "SELECT * FROM pgtrickle.explain_refresh_mode('x')") == ("AUTO", "FULL", "because")
    ids = shop.execute("SELECT refresh_id FROM pgtrickle.get_refresh_history('x', 3)").fetchall()
    assert ids == [(5,), (4,), (3,)]
    assert one(shop, "SELECT last_action, last_status FROM pgtrickle.pgt_status()") == ("FULL", "COMPLETED")


def test_settings_come_from_the_most_specific_origin(shop: Connection, database: TestDatabase) -> None:
    value = "SELECT pgtrickle._setting('placement')"
    assert one(shop, value) == ("auto",)
    shop.execute("SELECT pgtrickle.set('pg_trickle.placement', 'spark')")
    assert one(shop, value) == ("spark",)
    with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
        superuser.execute(f"ALTER DATABASE {database.name} SET pg_trickle.placement = 'auto'")
        assert one(shop, value) == ("auto",)  # although this session was open before
        superuser.execute(f"ALTER DATABASE {database.name} SET pg_trickle.placement = 'nonsense'")
        assert one(shop, value) == ("spark",)
    with pytest.raises(psycopg.errors.UndefinedObject) as caught:
        shop.execute("SELECT pgtrickle.set('plaecment', 'auto')")
    assert "placement" in str(caught.value.diag.message_hint)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="moon"):
        shop.execute("SELECT pgtrickle.set('placement', 'moon')")


def test_stable_hash_is_the_same_everywhere(shop: Connection) -> None:
    assert one(shop, "SELECT pgtrickle.stable_hash('public.orders'), pgtrickle.stable_hash('')") == (
        STABLE_HASHES[0], STABLE_HASHES[1],
    )  # fmt: skip


STABLE_HASHES = ("ce92a8fe6cbe98f9", "9fb1b765a7ea466d")


def test_the_dependencies_of_a_query_are_listed(shop: Connection) -> None:
    queries = {
        "SELECT now() AS t, id FROM orders": True,
        "SELECT id FROM orders WHERE CURRENT_DATE > '2020-01-01'": True,
        "SELECT age(TIMESTAMP '2020-01-01') AS a": True,
        "SELECT CURRENT_USER AS u, id + 1 AS i FROM orders": False,
        "SELECT age(TIMESTAMP '2020-01-01', TIMESTAMP '2021-01-01') AS a": False,
    }
    for number, (query, expected) in enumerate(queries.items()):
        shop.execute(f"CREATE VIEW v{number} AS {query}")
        assert one(shop, f"SELECT pgtrickle._time_dependent('v{number}')") == (expected,), query
    shop.execute("CREATE VIEW nested AS SELECT count(*) OVER (ORDER BY t) AS c, lower('A') AS l FROM v0")
    found = shop.execute("SELECT proname::text, provolatile::text FROM pgtrickle._functions_used('nested')").fetchall()
    assert {("now", "s"), ("count", "i"), ("lower", "i")} <= set(found)


def test_emergency_stop_and_resume(shop: Connection, database: TestDatabase) -> None:
    create(shop, "x", "SELECT id FROM orders")
    create(shop, "y", "SELECT id FROM customers")
    shop.execute("SELECT pgtrickle.alter_stream_table('y', status => 'SUSPENDED')")
    with psycopg.connect(database.direct_dsn) as writer:
        writer.execute("INSERT INTO shop.orders VALUES (1)")  # holds the table
        assert shop.execute("SELECT pgtrickle.emergency_stop()::text").fetchall() == [("orders",)]
    states = "SELECT pgt_name, status, reinit_reason FROM pgtrickle.pgt_stream_tables ORDER BY 1"
    stopped = [("x", "SUSPENDED", "emergency stop"), ("y", "SUSPENDED", "emergency stop")]
    assert shop.execute(states).fetchall() == stopped
    (buffer,) = one(
        shop, "SELECT buffer_relid::text FROM pgtrickle.pgt_change_tracking WHERE source_relid = 'orders'::regclass"
    )
    before = one(shop, f"SELECT count(*) FROM {buffer}")
    shop.execute("INSERT INTO orders VALUES (2)")
    assert one(shop, f"SELECT count(*) FROM {buffer}") == before
    assert shop.execute("SELECT pgtrickle.resume_capture()").fetchall() == []
    assert shop.execute(states).fetchall() == [("x", "INITIALIZING", "emergency stop"), stopped[1]]
    shop.execute("INSERT INTO orders VALUES (3)")
    assert one(shop, f"SELECT count(*) FROM {buffer}") == (before[0] + 1,)


def test_four_roles(roles: Roles) -> None:
    """The installing role, two owners and the service have no rights on each other's objects, and everything works."""
    mine = create(roles.alice, "st", "SELECT a FROM t", key_columns=["a"])
    theirs = create(roles.bob, "st", "SELECT a, secret FROM t")
    roles.alice.execute("INSERT INTO t VALUES (2, 'y')")
    # The service reads buffers itself, and what the queries read through the owners' functions.
    (buffer,) = one(
        roles.service,
        "SELECT t.buffer_relid::text FROM pgtrickle.pgt_change_tracking t JOIN pgtrickle.pgt_dependencies d"
        " USING (source_relid) WHERE d.pgt_id = %s",
        [mine],
    )
    assert roles.service.execute(f"SELECT __pgt_w, c1 FROM {buffer}").fetchall() == [(1, 2)]
    rows = roles.service.execute(
        f"SELECT a FROM pgtrickle_views.read_{mine}('SELECT * FROM pgtrickle_views.q_{mine}', '{{}}') AS r (a int) ORDER BY 1"
    ).fetchall()
    assert rows == [(1,), (2,)]
    with roles.service.transaction():
        roles.service.execute(
            "UPDATE pgtrickle.pgt_stream_tables SET apply_xid = pg_current_xact_id() WHERE pgt_id = %s", [mine]
        )
        statement = (
            "WITH i AS (INSERT INTO alice.st SELECT v::int FROM unnest($1) AS v RETURNING 1)"
            " SELECT ARRAY[count(*)] FROM i"
        )
        written = one(roles.service, f"SELECT pgtrickle_views.write_{mine}(%s, %s)", [statement, ["1", "2"]])
        assert written == ([2],)
    assert roles.alice.execute("SELECT a FROM st ORDER BY 1").fetchall() == [(1,), (2,)]
    roles.service.execute(f"DELETE FROM {buffer}")
    for pgt_id in (mine, theirs):
        assert one(roles.service, "SELECT pgtrickle._ownership_problem(%s)", [pgt_id]) == (None,)
        assert one(roles.service, "SELECT pgtrickle._privilege_problem(%s)", [pgt_id]) == (None,)
    roles.alice.execute("SELECT pgtrickle.drop_stream_table('st')")
    roles.bob.execute("SELECT pgtrickle.drop_stream_table('st')")
    assert catalog_is_empty(roles.installer)


def test_the_service_repairs_capture_with_the_owners_rights(roles: Roles) -> None:
    pgt_id = create(roles.alice, "st", "SELECT a FROM t")
    (source, buffer) = one(
        roles.service, "SELECT source_relid::oid, buffer_relid::text FROM pgtrickle.pgt_change_tracking"
    )
    roles.alice.execute("ALTER TABLE t RENAME COLUMN a TO b; INSERT INTO t VALUES (2, 'unseen')")
    assert one(roles.service, "SELECT kind FROM pgtrickle_changes.pgt_markers") == ("SCHEMA",)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        roles.service.execute(f"SELECT pgtrickle._retrack({source})")
    roles.service.execute(f"SELECT pgtrickle_views.write_{pgt_id}('SELECT pgtrickle._retrack({source})', NULL)")
    roles.alice.execute("INSERT INTO t VALUES (3, 'seen')")
    assert roles.service.execute(f"SELECT c1 FROM {buffer}").fetchall() == [(3,)]


def test_owners_have_no_rights_on_each_others_stream_tables(roles: Roles) -> None:
    mine = create(roles.alice, "st", "SELECT a FROM t")
    roles.alice.execute("GRANT USAGE ON SCHEMA alice TO PUBLIC")
    for statement in (
        "SELECT pgtrickle.drop_stream_table('alice.st')",
        "SELECT pgtrickle.alter_stream_table('alice.st', schedule => '1m')",
        "SELECT pgtrickle.alter_stream_table('alice.st', query => 'SELECT 1 AS a')",
        "SELECT pgtrickle.refresh_stream_table('alice.st')",
        f'SELECT pgtrickle._gate(\'update\', \'{{"id": {mine}, "schedule": "1m"}}\')',
        f"SELECT pgtrickle._gate('request', '{{\"id\": {mine}}}')",
        f"SELECT pgtrickle._update_stream_table('alice', {mine}, NULL, '1m', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
        f"SELECT pgtrickle._file_request('alice', {mine}, NULL, 'REFRESH')",
        f"SELECT * FROM pgtrickle_views.read_{mine}('SELECT 1', '{{}}') AS r (a int)",
        f"SELECT pgtrickle_views.write_{mine}('DROP TABLE alice.t', NULL)",
        f"CREATE OR REPLACE FUNCTION pgtrickle_views.read_{mine}(query text) RETURNS SETOF record LANGUAGE sql AS ''",
        "SELECT pgtrickle.create_stream_table('bob.x', 'SELECT a FROM alice.t')",
        "UPDATE pgtrickle.pgt_stream_tables SET schedule = '1m'",
        "INSERT INTO pgtrickle.pgt_settings (name, value) VALUES ('service_role', 'bob')",
        "SELECT * FROM pgtrickle_changes.pgt_activity",
        "SELECT pgtrickle._mark('x', 'TRUNCATE')",
        "SELECT pgtrickle._forget_source('x')",
        "SELECT pgtrickle._track('alice', 'alice.t', '{1}')",
        "SELECT pgtrickle._gate('track', jsonb_build_object('source', 'alice.t'::regclass::oid, 'columns', ARRAY[1]))",
        "SELECT pgtrickle.emergency_stop()",
        "SELECT pgtrickle.set('enabled', 'off')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            roles.bob.execute(statement)
    assert one(roles.alice, "SELECT schedule FROM pgtrickle.pgt_stream_tables") == ("calculated",)


def test_rights_on_another_owners_table(roles: Roles) -> None:
    roles.alice.execute(f"GRANT USAGE ON SCHEMA alice TO {roles.bob.info.user}")
    ask = ("bob.x", "SELECT a FROM alice.t")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=r"may not read column a of alice\.t") as caught:
        create(roles.bob, *ask)
    assert "GRANT SELECT" in str(caught.value.diag.message_hint)
    roles.alice.execute(f"GRANT SELECT (a) ON t TO {roles.bob.info.user}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=r"no TRIGGER privilege on alice\.t") as caught:
        create(roles.bob, *ask)
    roles.alice.execute(str(caught.value.diag.message_hint).partition("run: ")[2])
    pgt_id = create(roles.bob, *ask)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="column secret"):
        create(roles.bob, "bob.y", "SELECT a, secret FROM alice.t")
    roles.alice.execute(f"REVOKE SELECT (a) ON t FROM {roles.bob.info.user}")
    (problem,) = one(roles.service, "SELECT pgtrickle._privilege_problem(%s)", [pgt_id])
    assert "may not read column a of alice.t" in problem


def test_adding_columns_to_another_owners_capture_does_not_affect_the_others(roles: Roles) -> None:
    """A role with TRIGGER but no right to write cannot LOCK the table; the signature of the others must not change."""
    create(roles.alice, "st", "SELECT a FROM t")
    roles.alice.execute(
        f"GRANT USAGE ON SCHEMA alice TO {roles.bob.info.user}; GRANT SELECT, TRIGGER ON t TO {roles.bob.info.user}"
    )
    # By OID: the service may not even look into the owner's schema.
    (source,) = one(roles.alice, "SELECT 'alice.t'::regclass::oid")
    signature = f"SELECT pgtrickle._capture_signature({source}, '{{1}}')"
    before = one(roles.service, signature)
    create(roles.bob, "bob.x", "SELECT a, secret FROM alice.t")
    assert one(roles.service, signature) == before
    tracked = "SELECT tracked_columns FROM pgtrickle.pgt_change_tracking WHERE source_relid = 'alice.t'::regclass"
    assert one(roles.alice, tracked) == ([1, 2],)


def test_row_security_that_applies_to_the_owner_is_refused(roles: Roles) -> None:
    roles.alice.execute(
        f"GRANT USAGE ON SCHEMA alice TO {roles.bob.info.user}; GRANT SELECT, TRIGGER ON t TO {roles.bob.info.user}"
    )
    roles.alice.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON t USING (a > 1)")
    create(roles.alice, "st", "SELECT a FROM t")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match=r"row-level security on alice\.t applies"):
        create(roles.bob, "bob.x", "SELECT a FROM alice.t")
    roles.alice.execute("ALTER TABLE t FORCE ROW LEVEL SECURITY")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="row-level security"):
        create(roles.alice, "st2", "SELECT a FROM t")


def test_a_function_that_may_not_be_called_is_refused(roles: Roles) -> None:
    roles.alice.execute(
        "GRANT USAGE ON SCHEMA alice TO PUBLIC; CREATE FUNCTION f(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 1';"
        "REVOKE ALL ON FUNCTION f(int) FROM PUBLIC"
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=r"may not call alice\.f"):
        create(roles.bob, "bob.x", "SELECT alice.f(a) AS f FROM bob.t")


def test_the_right_to_create_ends_with_the_creation(roles: Roles) -> None:
    """Objects in pgtrickle_views belong to owners of stream tables, but no other objects can be created there."""
    create(roles.bob, "bob.mine", "SELECT 1 AS a")
    planted = "CREATE FUNCTION pgtrickle_views.read_9(text) RETURNS int LANGUAGE sql AS 'SELECT 1'"
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        roles.bob.execute(planted)
    # Neither by beginning a creation that is not ended, nor with something else in the middle of one.
    begin = f"BEGIN; SELECT pgtrickle._gate('begin_create', '{{}}'); {planted};"
    with pytest.raises(psycopg.errors.InvalidTransactionState, match="was not completed"):
        roles.bob.execute(f"{begin} COMMIT")
    with pytest.raises(psycopg.errors.InvalidObjectDefinition, match="read_9"):
        roles.bob.execute(f"{begin} SELECT pgtrickle.create_stream_table('bob.other', 'SELECT 1 AS a'); COMMIT")
    roles.bob.rollback()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        roles.bob.execute(planted)
    assert create(roles.alice, "st", "SELECT a FROM t") > 1


def test_a_change_of_owner_is_noticed(roles: Roles) -> None:
    pgt_id = create(roles.alice, "st", "SELECT a FROM t")
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as superuser:
        superuser.execute(f"ALTER TABLE alice.st OWNER TO {roles.bob.info.user}")
    (problem,) = one(roles.service, "SELECT pgtrickle._ownership_problem(%s)", [pgt_id])
    assert "view and functions" in problem


def test_members_of_the_owning_role_act_for_it(roles: Roles) -> None:
    create(roles.alice, "st", "SELECT a FROM t")
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as superuser:
        superuser.execute(f"GRANT {roles.alice.info.user} TO {roles.bob.info.user}")
    roles.bob.execute("SELECT pgtrickle.alter_stream_table('alice.st', schedule => '1m')")
    roles.bob.execute(f"SET ROLE {roles.alice.info.user}")
    roles.bob.execute("SELECT pgtrickle.drop_stream_table('alice.st')")


def test_two_concurrent_creations(roles: Roles) -> None:
    errors: list[psycopg.Error] = []
    with psycopg.connect(roles.database.direct_dsn_as(roles.alice.info.user), autocommit=True) as second:
        second.execute("SET search_path = alice")

        def many(conn: Connection, prefix: str) -> None:
            try:
                for number in range(5):
                    create(conn, f"{prefix}{number}", "SELECT a FROM t")
            except psycopg.Error as error:
                errors.append(error)

        threads = [threading.Thread(target=many, args=args) for args in ((roles.alice, "x"), (second, "y"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert one(roles.alice, "SELECT count(*) FROM pgtrickle.pgt_stream_tables") == (10,)


def test_creations_on_the_same_source_wait_for_each_other(roles: Roles) -> None:
    create(roles.alice, "first", "SELECT a FROM t")
    errors: list[psycopg.Error] = []
    with psycopg.connect(roles.database.direct_dsn_as(roles.alice.info.user), autocommit=True) as second:
        second.execute("SET search_path = alice")

        def late() -> None:
            try:
                create(second, "third", "SELECT a FROM t")
            except psycopg.Error as error:
                errors.append(error)

        thread = threading.Thread(target=late)
        with roles.alice.transaction():
            create(roles.alice, "second", "SELECT a FROM t")
            thread.start()
            waits = "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted"
            while one(roles.installer, waits, [second.info.backend_pid]) == (0,) and thread.is_alive():
                roles.installer.execute("SELECT pg_sleep(0.005)")
        thread.join()
    assert errors == []
    assert one(roles.alice, "SELECT count(*) FROM pgtrickle.pgt_stream_tables") == (3,)

"""One table in many databases: database sets, and members that join, leave, get lost and return."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import psycopg
import pytest
from sqlglot import exp

import pgtrickle
from pgtrickle.catalog.gate import pass_gate
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import DatabaseFailedError, InvalidQueryError, NotDifferentiableError, PrivilegeError
from pgtrickle.ivm.differentiate import MOST_OPERATORS
from pgtrickle.query.plan import Column, Filter, Plan, Relation, RelationColumn, Scan, UnionAll, Version
from pgtrickle.query.types import PgType
from pgtrickle.sites.remote import connections
from tests.support.service import running_service, until
from tests.support.tenants import QUERIES, Tenants, tenants

READ = (
    "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) FROM pg_stat_user_tables"
    " WHERE schemaname = 'pgtrickle_changes' AND relname LIKE 'changes%' OR relname = 'orders'"
)


OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@pytest.fixture(autouse=True)
def try_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RETRY_SECONDS", 0.0)


@pytest.fixture
def shop(server: EmbeddedServer) -> Iterator[Tenants]:
    with tenants(server, 4) as made:
        yield made


@pytest.fixture
def db(shop: Tenants) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(shop.home.dsn) as connected:
        yield connected


def register(shop: Tenants, db: pgtrickle.Database) -> None:
    """Register all tenants, and a set of those whose names match."""
    for name in shop.names:
        db.add_database(name, shop.dsn(name))
    db.add_database_set("tenants", pattern=f"{shop.prefix}_*")


def create(db: pgtrickle.Database, *names: str) -> None:
    for name in names:
        assert db.create_stream_table(name, QUERIES[name]).effective_mode == "DIFFERENTIAL"


def test_twenty_databases_are_one_source(server: EmbeddedServer) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with tenants(server, 20) as shop, pgtrickle.connect(shop.home.dsn) as db:
        register(shop, db)
        create(db, *QUERIES)
        assert db.stream_table("rows").key == ("pgt_database", "id")
        shop.assert_exact(*QUERIES)
        for _ in range(3):
            for name in chance.sample(shop.names, 5):
                shop.change(name, chance)
            for result in db.refresh(list(QUERIES)):
                assert result.action == "DIFFERENTIAL"
            shop.assert_exact(*QUERIES)
        # Rows of another database's table find those of all members.
        shop_conn = psycopg.connect(shop.home.direct_dsn, autocommit=True)
        with shop_conn:
            shop_conn.execute("UPDATE plans SET plan = 'none' WHERE tenant LIKE '%\\_07'")
        assert [one.action for one in db.refresh(["named", "totals"])] == ["DIFFERENTIAL", "NO_DATA"]
        shop.assert_exact(*QUERIES)
        assert_busy_member_costs_work_there_only(shop, db)


def _is_alone(conn: psycopg.Connection) -> bool:
    return conn.execute(OTHERS).fetchone() == (0,)


def rows_read(shop: Tenants, db: pgtrickle.Database) -> dict[str, int]:
    """Of orders and their change buffers, in each database. Statistics come when a connection ends."""
    db.engine.connections.close()
    found = {}
    for name in shop.names:
        with psycopg.connect(shop.server.dsn(name), autocommit=True) as conn:
            until(partial(_is_alone, conn))
            row = conn.execute(READ).fetchone()
            assert row is not None
            found[name] = int(row[0])
    return found


def assert_busy_member_costs_work_there_only(shop: Tenants, db: pgtrickle.Database) -> None:
    busy = shop.names[1]
    before = rows_read(shop, db)
    changed = 2000
    shop.run(busy, f"INSERT INTO orders SELECT 1000 + i, i % 9, i, 'busy' FROM generate_series(1, {changed}) AS i")
    (result,) = db.refresh("totals")
    assert result.action == "DIFFERENTIAL"
    read = {name: now - before[name] for name, now in rows_read(shop, db).items()}
    print(f"{changed} changes in one of {len(read)} databases, {sum(read.values())} rows read")
    assert changed <= sum(read.values()) <= 1.2 * changed
    assert all(number == 0 for name, number in read.items() if name != busy)
    shop.assert_exact("totals")


def test_members_come_and_go(shop: Tenants, db: pgtrickle.Database) -> None:
    register(shop, db)
    create(db, *QUERIES)
    new = shop.create(4)
    db.add_database(new, shop.dsn(new))
    # Only the new one is read.
    assert [one.action for one in db.refresh(list(QUERIES))] == ["DIFFERENTIAL"] * 4
    shop.assert_exact(*QUERIES)
    shop.change(new, random.Random(7))
    assert [one.action for one in db.refresh(["rows", "totals"])] == ["DIFFERENTIAL"] * 2
    db.remove_database(shop.names[0])
    results = db.refresh(list(QUERIES))
    assert [one.action for one in results] == ["REINITIALIZE"] * 4
    assert f"{shop.names[0]} left the set" in str(db.history("rows", 1)[0]["reason"])
    shop.assert_exact(*QUERIES, of=shop.names[1:])
    db.refresh(list(QUERIES))
    assert shop.names[0] not in next(iter(db.database_sets())).members


def test_a_lost_member_is_waited_for_or_its_rows_are_kept(shop: Tenants, db: pgtrickle.Database) -> None:
    register(shop, db)
    create(db, *QUERIES)
    db.alter_stream_table("totals", lost_members="keep")
    db.alter_stream_table("named", lost_members="keep")
    lost, other = shop.names[0], shop.names[2]
    shop.run(lost, "DELETE FROM orders WHERE id < 10")
    shop.set_open(lost, False)
    shop.run(other, "DELETE FROM orders WHERE id < 5")
    with pytest.raises(DatabaseFailedError, match=lost):
        db.refresh("rows")
    assert [one.action for one in db.refresh(["totals", "named"])] == ["DIFFERENTIAL"] * 2
    with psycopg.connect(shop.home.direct_dsn, autocommit=True) as conn:
        found: dict[str, int] = dict(conn.execute("SELECT pgt_database, n FROM totals").fetchall())
        assert (found[lost], found[other]) == (40, 36)
        # Its rows would be needed, and cannot be had.
        conn.execute("UPDATE plans SET plan = 'other'")
        with pytest.raises(DatabaseFailedError, match=lost):
            db.refresh("named")
    shop.set_open(lost, True)
    db.refresh(list(QUERIES))
    shop.assert_exact(*QUERIES)


def test_a_database_that_does_not_match_does_not_join_and_is_reported(shop: Tenants, db: pgtrickle.Database) -> None:
    register(shop, db)
    create(db, "rows", "totals")
    other, without = shop.create(4), shop.create(5)
    shop.run(other, "ALTER TABLE orders ALTER amount TYPE float8")
    shop.run(without, "DROP TABLE orders")
    for name in (other, without):
        db.add_database(name, shop.dsn(name))
    (tenants_,) = db.database_sets()
    assert tenants_.problem is not None
    assert f"column amount of public.orders is different in database {other}" in tenants_.problem
    assert f"database {without} has no table public.orders" in tenants_.problem
    db.refresh(["rows", "totals"])
    shop.assert_exact("rows", "totals", of=shop.names[:4])
    shop.run(without, "CREATE TABLE orders (id int PRIMARY KEY, customer int, amount numeric(10,2), note text)")
    shop.run(without, "INSERT INTO orders VALUES (1, 1, 1, 'late')")
    db.engine.sets.update_members()
    assert [one.action for one in db.refresh(["rows", "totals"])] == ["DIFFERENTIAL"] * 2
    shop.assert_exact("rows", "totals", of=[*shop.names[:4], without])


def test_alterations_of_an_idle_member_are_noticed(shop: Tenants, db: pgtrickle.Database) -> None:
    register(shop, db)
    create(db, "rows", "totals")
    quiet = shop.names[3]
    shop.run(quiet, "ALTER TABLE orders RENAME amount TO price")
    with pytest.raises(pgtrickle.errors.PgtrickleError, match="amount"):
        db.refresh("totals")
    shop.run(quiet, "ALTER TABLE orders RENAME price TO amount")
    shop.run(quiet, "TRUNCATE orders")
    db.refresh(["rows", "totals"])
    shop.assert_exact("rows", "totals")


def test_databases_of_a_server_are_found_by_their_names(shop: Tenants, db: pgtrickle.Database) -> None:
    server = shop.server.dsn("postgres", "app")
    added = db.add_database_set("tenants", pattern=f"{shop.prefix}_*", server=server)
    assert added.members == shop.names
    create(db, "totals")
    new = shop.create(4)
    db.engine.sets.update_members()
    assert [one.action for one in db.refresh(["totals"])] == ["DIFFERENTIAL"]
    shop.assert_exact("totals")
    shop.drop(shop.names[0])
    db.engine.connections.close()
    db.engine.sets.update_members()
    assert db.database_sets()[0].members == shop.names
    assert new in shop.names
    assert [one.action for one in db.refresh(["totals"])] == ["REINITIALIZE"]
    shop.assert_exact("totals")


def test_a_member_that_leaves_during_a_refresh_is_taken_out(shop: Tenants) -> None:
    leaving = shop.names[0]
    once = [False]

    def on_step(step: str) -> None:
        if step == "spark" and once[0]:
            once[0] = False
            with pgtrickle.connect(shop.home.dsn) as other:
                other.remove_database(leaving)

    with pgtrickle.connect(shop.home.dsn, on_step=on_step) as db:
        register(shop, db)
        create(db, "totals")
        shop.run(shop.names[1], "DELETE FROM orders WHERE id < 5")
        once[0] = True
        db.refresh("totals")
        assert not once[0]
        assert db.refresh("totals")[0].action == "REINITIALIZE"
        shop.assert_exact("totals", of=shop.names[1:])


def test_a_registered_database_becomes_a_member(shop: Tenants, db: pgtrickle.Database) -> None:
    *others, late = shop.names
    for name in shop.names:
        db.add_database(name, shop.dsn(name))
    db.add_database_set("tenants", others)
    query = f"{QUERIES['rows']} UNION ALL SELECT 'own', id, amount FROM {late}.public.orders"
    db.create_stream_table("rows", query)
    db.add_database_set("tenants", shop.names)
    assert db.refresh("rows")[0].action == "REINITIALIZE"
    with psycopg.connect(shop.home.direct_dsn) as conn:
        found = conn.execute(
            "SELECT pgt_database, count(*) FROM rows WHERE pgt_database IN (%s, 'own') GROUP BY 1", (late,)
        )
        assert {row[0] for row in found} == {late, "own"}


def test_the_service_reads_new_members(shop: Tenants, db: pgtrickle.Database) -> None:
    register(shop, db)
    create(db, "totals")
    new = shop.create(4)
    with running_service(shop.home.superuser_dsn, shop.home.name):
        db.add_database(new, shop.dsn(new))
        with psycopg.connect(shop.home.direct_dsn, autocommit=True) as conn:
            until(lambda: conn.execute("SELECT n FROM totals WHERE pgt_database = %s", (new,)).fetchone() == (40,))
    shop.assert_exact("totals")


def test_a_new_member_that_is_lost_at_once_is_skipped_with_keep(shop: Tenants, db: pgtrickle.Database) -> None:
    register(shop, db)
    create(db, "rows", "totals")
    db.alter_stream_table("totals", lost_members="keep")
    new = shop.create(4)
    db.add_database(new, shop.dsn(new))
    shop.set_open(new, False)
    db.engine.connections.close()
    shop.run(shop.names[0], "DELETE FROM orders WHERE id < 5")
    assert db.refresh("totals")[0].action == "DIFFERENTIAL"
    with pytest.raises(DatabaseFailedError, match=new):
        db.refresh("rows")
    shop.set_open(new, True)
    db.refresh(["rows", "totals"])
    shop.assert_exact("rows", "totals")


def test_an_expression_that_fails_for_a_change_also_reads_idle_members(shop: Tenants, db: pgtrickle.Database) -> None:
    register(shop, db)
    query = "SELECT pgt_database, id, 100 / customer AS part FROM tenants.public.orders WHERE customer > 0"
    db.create_stream_table("parts", query)
    with psycopg.connect(shop.dsn(shop.names[2]), autocommit=True) as conn:
        conn.execute("INSERT INTO orders VALUES (900, 0, 1, 'zero'), (901, 4, 1, 'four')")
    db.refresh("parts")
    with psycopg.connect(shop.home.direct_dsn) as conn:
        assert conn.execute("SELECT part FROM parts WHERE id = 901").fetchall() == [(25,)]
        assert conn.execute("SELECT count(*) FROM parts WHERE id = 900").fetchone() == (0,)


def test_roles_of_a_set_may_use_no_other_database(shop: Tenants, db: pgtrickle.Database) -> None:
    role = shop.home.create_role("analyst")
    with psycopg.connect(shop.home.direct_dsn, autocommit=True) as conn:
        conn.execute(f"GRANT CREATE, USAGE ON SCHEMA public TO {role}".encode())
    *members, private = shop.names
    for name in shop.names:
        db.add_database(name, shop.dsn(name))
    db.add_database_set("tenants", members, roles=[role])
    db.import_table(private, "public.orders")
    db.import_table("tenants", "public.orders")
    with pgtrickle.connect(shop.home.dsn_as(role)) as theirs:
        theirs.create_stream_table("totals", QUERIES["totals"], initialize=False)
        theirs.conn.execute("GRANT SELECT ON totals TO app")

        def stand_in(names: list[str]) -> None:
            pass_gate(
                theirs.conn, "import_set_table", database_set="tenants", schema="public", name="orders", members=names
            )

        with pytest.raises(psycopg.errors.InvalidParameterValue, match="not all of these databases are members"):
            stand_in([*members, private])
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="take databases out of a set"):
            stand_in(members[:1])
        with pytest.raises(PrivilegeError):
            theirs.create_stream_table("theirs", f"SELECT id FROM {private}.public.orders", initialize=False)
    db.refresh("totals")
    shop.assert_exact("totals", of=members)


def test_a_hundred_members_are_not_too_many() -> None:
    """For planning; real databases would take minutes."""
    text, integer = PgType(25, -1, "text"), PgType(23, -1, "integer")
    columns = (RelationColumn("pgt_database", 1, text, True), RelationColumn("id", 2, integer, True))
    members = tuple(
        Relation(i, "public", "orders", "r", columns[1:], ("id",), database=f"t{i}", shard=True) for i in range(1, 121)
    )
    change = UnionAll(
        tuple(_filtered(one, integer) for one in members),
        (Column("c0", "id", integer),),
    )
    assert change.operators <= MOST_OPERATORS


def _filtered(member: Relation, type_: PgType) -> Plan:
    scan: Plan = Scan(member, ((Column(f"c{member.oid}", "id", type_), member.columns[0]),), Version.DELTA)
    for _ in range(6):
        scan = Filter(scan, exp.true())
    return scan


def test_errors_about_sets(shop: Tenants, db: pgtrickle.Database) -> None:
    with pytest.raises(InvalidQueryError, match="there is no registered database nobody"):
        db.add_database_set("tenants", ["nobody"])
    register(shop, db)
    with pytest.raises(InvalidQueryError, match=rf"database {shop.names[0]} has no table public\.nothing"):
        db.create_stream_table("lost", "SELECT * FROM tenants.public.nothing")
    with pytest.raises(NotDifferentiableError, match="STRING_AGG"):
        db.create_stream_table("texts", "SELECT string_agg(note, ',') AS notes FROM tenants.public.orders")
    create(db, "totals")
    with pytest.raises(InvalidQueryError, match=r"stream tables read tables of tenants: public\.totals"):
        db.remove_database("tenants")
    with pytest.raises(InvalidQueryError, match="lost_members cannot be 'never'"):
        db.alter_stream_table("totals", lost_members="never")
    for name in shop.names[1:]:
        db.remove_database(name)
    with pytest.raises(InvalidQueryError, match="is the last database behind"):
        db.remove_database(shop.names[0])
    db.drop_stream_table("totals")
    db.remove_database("tenants")
    assert db.database_sets() == []

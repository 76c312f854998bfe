"""Capture functions write only to the buffer of their own source."""

from __future__ import annotations

import psycopg
import pytest

from tests.security.roles import Roles
from tests.security.shadows import shadows
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.pgversions


def test_a_capture_function_is_not_attached_to_another_table(roles: Roles) -> None:
    alice, mallory = roles.alice, roles.mallory
    name = roles.create(alice, "mine", f"SELECT id, amount FROM {alice}.orders")
    roles.refresh(name)
    hash_ = roles.value(roles.app, "SELECT source_stable_name FROM pgtrickle.pgt_change_tracking")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        roles.sql(
            mallory,
            f"CREATE TABLE {mallory}.orders (id int, kind text, amount numeric(10,2))",
            f"CREATE TRIGGER pgtrickle_capture_insert_{hash_} AFTER INSERT ON {mallory}.orders"
            f" REFERENCING NEW TABLE AS __pgt_new FOR EACH STATEMENT EXECUTE FUNCTION pgtrickle_changes.capture_{hash_}()",
        )


def test_a_second_role_with_trigger_privilege_can_have_more_columns_captured(roles: Roles) -> None:
    """A second role with TRIGGER on the table, and no right to write to it, has more of its columns captured."""
    alice, bob = roles.alice, roles.bob
    roles.create(alice, "mine", f"SELECT id FROM {alice}.orders")
    roles.sql(alice, f"GRANT USAGE ON SCHEMA {alice} TO {bob}", f"GRANT SELECT, TRIGGER ON {alice}.orders TO {bob}")
    name = roles.create(bob, "more", f"SELECT id, kind, amount FROM {alice}.orders")
    roles.refresh(name)
    roles.sql(alice, f"UPDATE {alice}.orders SET amount = amount + 1")
    roles.refresh(name)
    with roles.connect(bob) as conn:
        assert_equal_to_query(conn, name, f"SELECT id, kind, amount FROM {alice}.orders")


@pytest.mark.parametrize("way", ["temporary", "search path"])
@pytest.mark.parametrize("kind", ["statement", "row"])
def test_capture_takes_no_names_of_a_writer(roles: Roles, kind: str, way: str) -> None:
    """Capture functions run in the writer's session, with the rights of the role that installed the catalog."""
    mallory = roles.mallory
    roles.sql(
        mallory,
        f"CREATE TABLE {mallory}.parts (id int, note text) PARTITION BY RANGE (id)",
        f"CREATE TABLE {mallory}.part PARTITION OF {mallory}.parts FOR VALUES FROM (0) TO (1000) PARTITION BY RANGE (id)",
        f"CREATE TABLE {mallory}.early PARTITION OF {mallory}.part FOR VALUES FROM (0) TO (100)",
    )
    source = f"{mallory}.{'part' if kind == 'row' else 'parts'}"
    query = f"SELECT id, note FROM {source}"
    name = roles.create(mallory, "hers", query)
    captured = "SELECT capture_kind FROM pgtrickle.pgt_change_tracking WHERE source_relid = %s::regclass"
    assert roles.value(mallory, captured, [source]) == kind
    roles.refresh(name)
    roles.sql(
        mallory,
        *shadows(way, mallory),
        f"INSERT INTO {source} SELECT i, 'x' FROM pg_catalog.generate_series(1, 20) AS i",
        f"UPDATE {source} SET note = 'y' WHERE id > 10",
        f"DELETE FROM {source} WHERE id > 15",
    )
    roles.assert_powerless()
    roles.refresh(name)
    with roles.connect(mallory) as conn:
        assert_equal_to_query(conn, name, query)

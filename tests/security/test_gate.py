"""Everybody may pass the gate, with any action and any arguments: it does nothing to what belongs to others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import psycopg
import pytest

from tests.security.roles import Roles

pytestmark = pytest.mark.pgversions

# Actions that have another test, because they change nothing for one stream table or need a cluster.
ELSEWHERE = {
    "begin_create",  # test_review.py: only opens a schema, and the transaction cannot be committed
    "untrack_unused",  # test_review.py: tidies up
    "track_shards",  # test_citus_nodes.py
    "read_from_nodes",  # test_citus_nodes.py
}


def gate(action: str, arguments: Mapping[str, Any]) -> str:
    return f"SELECT pgtrickle._gate('{action}', $gate${json.dumps(arguments)}$gate$)"


def known_actions(roles: Roles) -> set[str]:
    body = roles.value(roles.app, "SELECT prosrc FROM pg_proc WHERE oid = 'pgtrickle._pass_gate()'::regprocedure")
    return set(re.findall(r"NEW\.action = '(\w+)'", body))


def attacks(roles: Roles, mine: str, hers: str) -> dict[str, dict[str, Any]]:
    """What mallory says to have something done to a stream table of alice's, its source, or a database not hers to use."""
    query = "SELECT pgt_relid::oid::bigint, view_relid::oid::bigint FROM pgtrickle.pgt_stream_tables WHERE pgt_id = %s"
    id_ = roles.id_of(mine)
    ((storage, view),) = roles.rows(roles.app, query, [id_])
    source = roles.value(roles.app, "SELECT %s::regclass::oid::bigint", [f"{roles.alice}.orders"])
    stable = roles.value(
        roles.app, "SELECT source_stable_name FROM pgtrickle.pgt_change_tracking WHERE source_relid = %s", [source]
    )
    column = {"name": "id", "attnum": 1, "type": "integer", "not_null": True}
    table = {"schema": "s", "name": "t", "relid": 1, "node": "1/1", "shape": "x", "columns": [column], "key": ["id"]}
    this = {"id": id_}
    options = {"query": "SELECT 1", "schedule": "1h", "refresh_mode": "FULL", "session_settings": {}}
    return {
        "is_captured": {"source": source, "columns": [1]},
        "grant_capture": {"source": source},
        "track": {"source": source, "columns": [1, 2, 3]},
        "mark_gap": {"source": source, "stable_name": stable},
        "begin_alter": this,
        "lock_for_drop": {"ids": [id_]},
        "register": this | {"storage": storage, "view": view} | options,
        "update": this | {"status": "SUSPENDED"} | options,
        "record_mode": this | {"mode": "FULL", "reason": "because"},
        "record_coordinator": this,
        "record_st_placement": this | {"placement": "local"},
        "create_group": {"name": "taken", "ids": [id_, roles.id_of(hers)]},
        "drop_group": {"name": "alices"},
        "reset_fuse": this | {"action": "skip_changes"},
        "request": this | {"key": "key"},
        "ask_for_changes": this | {"reader": roles.id_of(hers)},
        "import_table": {"database": "crm", "definition": table},
        "import_set_table": {"database_set": "crms", "schema": "s", "name": "t", "members": ["crm"]},
        "resolve_foreign_table": {"source": source, "database": "crm", "definition": table},
        "record_functions": {"database": "crm", "functions": ["f()"], "definitions": ["x"], "problems": [""]},
    }


def state(roles: Roles) -> dict[str, list[str]]:
    """All rows of the catalog and of the buffers; all rights, functions and triggers of the database."""
    ours = "ARRAY['pgtrickle', 'pgtrickle_changes', 'pgtrickle_views']::regnamespace[]"
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as conn:
        tables = conn.execute(
            f"SELECT oid::regclass::text FROM pg_class WHERE relkind IN ('r', 'p') AND relnamespace = ANY ({ours})"
        ).fetchall()
        queries = {table: f"SELECT t::text FROM {table} AS t" for (table,) in tables} | {
            "relations": "SELECT ROW(oid::regclass, relowner, relacl)::text FROM pg_class WHERE relkind IN ('r', 'v', 'p')",
            "columns": "SELECT ROW(attrelid::regclass, attname, attacl)::text FROM pg_attribute WHERE attacl IS NOT NULL",
            "schemas": "SELECT ROW(nspname, nspowner, nspacl)::text FROM pg_namespace WHERE nspname !~ '^pg_'",
            "functions": f"SELECT p::text FROM pg_proc AS p WHERE pronamespace = ANY ({ours})",
            "triggers": "SELECT ROW(tgrelid::regclass, tgname, tgfoid::regprocedure, tgenabled)::text FROM pg_trigger",
        }
        return {name: sorted(row for (row,) in conn.execute(query.encode())) for name, query in queries.items()}


def test_it_does_nothing_to_what_belongs_to_others(roles: Roles) -> None:
    alice, mallory = roles.alice, roles.mallory
    query = f"SELECT kind, sum(amount) AS s FROM {alice}.orders GROUP BY kind"
    mine, other = (roles.create(alice, name, query) for name in ("mine", "other"))
    hers = roles.create(mallory, "hers", f"SELECT id, v FROM {mallory}.src")
    roles.sql(alice, f"SELECT pgtrickle.create_refresh_group('alices', '{{{mine},{other}}}')")
    roles.sql(
        roles.app,
        "SELECT pgtrickle._register_database('crm', 'host=crm.internal', '1/1', '{}')",
        "SELECT pgtrickle._register_set('crms', 'cr*', '{}', NULL, '{}')",
    )
    said = attacks(roles, mine, hers)
    assert said.keys() | ELSEWHERE == known_actions(roles), "an action of the gate that nobody attacks"
    before = state(roles)
    for action, arguments in said.items():
        with roles.connect(mallory) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege) as refused:
            conn.execute(gate(action, arguments).encode())
        assert f"role {mallory} may not" in str(refused.value) or "TRIGGER privilege" in str(refused.value), action
    assert state(roles) == before


def test_who_passes_it_is_not_an_argument(roles: Roles) -> None:
    """The caller is a column of the view, and can be neither written nor chosen."""
    alice, mallory = roles.alice, roles.mallory
    mine = roles.create(alice, "mine", f"SELECT id FROM {alice}.orders")
    arguments = json.dumps({"id": roles.id_of(mine), "status": "SUSPENDED", "caller": alice})
    change = f"action = 'update', arguments = '{arguments}'"
    ids = f"'{alice}', {roles.id_of(mine)}"
    for forged, error in {
        f"UPDATE pgtrickle.gate SET caller = '{alice}', {change}": psycopg.errors.InsufficientPrivilege,
        f"UPDATE pgtrickle.gate SET {change}": psycopg.errors.InsufficientPrivilege,
        f"INSERT INTO pgtrickle.gate VALUES ('{alice}', 'update', '{arguments}')": psycopg.Error,
        f"SELECT pgtrickle._record_mode({ids}, 'FULL', 'because')": psycopg.errors.InsufficientPrivilege,
    }.items():
        with pytest.raises(error):
            roles.sql(mallory, forged)
    roles.sql(mallory, f"UPDATE pgtrickle.gate SET {change} WHERE caller = '{alice}'")  # there is no such row
    status = "SELECT status FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'mine'"
    assert roles.value(roles.app, status) == "INITIALIZING"

"""No owner can prevent others from being served, whatever it requests."""

from __future__ import annotations

import psycopg
import pytest

from tests.security.roles import Roles
from tests.support.service import running_service, until

pytestmark = [pytest.mark.pgversions, pytest.mark.direct("advisory locks need a session")]

KEY = 4711
HOLD = f"""
CREATE FUNCTION {{m}}.hold(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    WHILE NOT pg_try_advisory_xact_lock_shared({KEY}) LOOP
        PERFORM pg_sleep(0.05);
    END LOOP;
    RETURN v;
END $$"""


def test_requests_of_one_owner_do_not_take_all_workers(roles: Roles) -> None:
    """Mallory requests refreshes that take as long as she likes; alice is served meanwhile."""
    alice, mallory = roles.alice, roles.mallory
    roles.sql(mallory, HOLD.format(m=mallory))
    traps = [
        roles.create(mallory, f"trap{i}", f"SELECT id FROM {mallory}.src WHERE {mallory}.hold(v + {i}) < 0")
        for i in range(6)
    ]
    mine = roles.create(alice, "mine", f"SELECT id, amount FROM {alice}.orders WHERE amount < 0", schedule="100ms")
    roles.refresh(mine)
    roles.sql(roles.app, "UPDATE pgtrickle.pgt_stream_tables SET own_seconds = 9 WHERE pgt_name LIKE 'trap%'")
    running = "SELECT count(*) FROM pgtrickle.pgt_jobs WHERE status = 'RUNNING'"
    with psycopg.connect(roles.database.direct_dsn_as(mallory), autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(%s)", (KEY,))
        with running_service(roles.database.dsn, roles.database.name) as service:
            roles.sql(mallory, *(f"SELECT pgtrickle.refresh_stream_table('{trap}')" for trap in traps))
            until(lambda: roles.value(roles.app, running) >= service.pool.size - 1)
            roles.sql(alice, f"INSERT INTO {alice}.orders VALUES (900, 'k1', -1)")
            roles.sql(alice, f"CALL pgtrickle.wait_until_fresh('{mine}', '15 seconds')")
            assert roles.rows(alice, f"SELECT id, amount FROM {mine}") == [(900, -1)]
            # Once alice's job has ended: those of mallory are held, so they would still run on all workers.
            until(lambda: roles.value(roles.app, running) == service.pool.size - 1)
            holder.execute("SELECT pg_advisory_unlock(%s)", (KEY,))

"""An owner's code that ignores cancellation."""

from __future__ import annotations

import pytest

from pgtrickle.postgres import fence
from tests.security.roles import Roles, Worker
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.pgversions

STUBBORN = """
CREATE FUNCTION {m}.stubborn(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    LOOP
        BEGIN
            PERFORM pg_sleep(60);
        EXCEPTION WHEN query_canceled THEN
            NULL;
        END;
    END LOOP;
END $$"""


def test_code_that_ignores_its_cancellation_is_terminated(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "READ_SECONDS", 3.0)
    alice, mallory = roles.alice, roles.mallory
    roles.sql(mallory, STUBBORN.format(m=mallory))
    trap = roles.create(mallory, "trap", f"SELECT id, {mallory}.stubborn(v) AS v FROM {mallory}.src")
    query = f"SELECT id, amount FROM {alice}.orders"
    mine = roles.create(alice, "mine", query)
    worker = Worker(roles.database.dsn)
    worker.refresh(roles.id_of(trap))
    worker.refresh(roles.id_of(mine))
    worker.close()
    assert roles.rows(
        roles.app, "SELECT status, status_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'trap'"
    ) == [("SUSPENDED", "its code continued after it was canceled")]
    with roles.connect(alice) as conn:
        assert_equal_to_query(conn, mine, query)

"""If an owner's code ends its session, its own stream table is suspended, whenever the service notices the end."""

from __future__ import annotations

from contextlib import closing, suppress

import psycopg
import pytest

from pgtrickle.postgres.fence import blamed_for_timeouts
from tests.security.roles import Roles
from tests.support.service import until

pytestmark = pytest.mark.pgversions


def test_a_session_may_end_between_two_statements(roles: Roles) -> None:
    trap = roles.create(roles.mallory, "trap", f"SELECT id, v FROM {roles.mallory}.src")
    with (
        closing(psycopg.connect(roles.database.direct_dsn)) as conn,
        roles.connect(roles.app) as other,
        blamed_for_timeouts(conn, [roles.id_of(trap)]),
    ):
        conn.execute("SET LOCAL idle_in_transaction_session_timeout = '1ms'")
        gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s"
        until(lambda: other.execute(gone, (conn.info.backend_pid,)).fetchone() == (True,), "the end of the session")
        with suppress(psycopg.OperationalError):  # if the end of the connection has arrived together with the message
            conn.pgconn.consume_input()  # as psycopg does while it reads the last of a result
        conn.pgconn.is_busy()
    found = roles.rows(
        roles.app, f"SELECT status, status_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_id = {roles.id_of(trap)}"
    )
    assert found == [("SUSPENDED", "its code ended the session that it ran in")]

"""JIT compilation during refreshes."""

from __future__ import annotations

import psycopg
import pytest

import pgtrickle
from tests.support.database import TestDatabase

# The result of a DIFFERENTIAL query is computed by PostgreSQL where it recomputes groups and finishes rows.
QUERIES = {
    "FULL": "SELECT current_setting('jit') AS jit, count(*) AS n FROM public.orders",
    "DIFFERENTIAL": "SELECT kind, public.jit() AS jit, max(id) AS newest FROM public.orders GROUP BY kind",
}


@pytest.mark.parametrize("mode", QUERIES)
@pytest.mark.pgversions
def test_refreshes_run_without_jit_compilation(
    database: TestDatabase, conn: psycopg.Connection[tuple[str, ...]], mode: str
) -> None:
    """It costs seconds per statement, because PostgreSQL overestimates the rows of changes and lookups."""
    conn.execute(f'ALTER DATABASE "{database.name}" SET jit = on')
    conn.execute("CREATE TABLE public.orders (id int PRIMARY KEY, kind text)")
    conn.execute("CREATE FUNCTION public.jit() RETURNS text IMMUTABLE RETURN current_setting('jit')")
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        table = db.create_stream_table("public.report", QUERIES[mode])
        assert table.effective_mode == mode
        conn.execute("INSERT INTO public.orders VALUES (1, 'a')")
        db.refresh("public.report")
    with psycopg.connect(database.direct_dsn) as session:
        assert session.execute("SHOW jit").fetchone() == ("on",)
        assert session.execute("SELECT jit FROM public.report").fetchall() == [("off",)]

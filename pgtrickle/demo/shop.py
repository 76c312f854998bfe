"""The shop of the demo: its data, its stream tables, and a thread that changes the data."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from types import TracebackType
from typing import Any, Self

import psycopg

from pgtrickle.embedded.server import EmbeddedServer

ROLE = DATABASE = "shop"
SETTINGS = {"fsync": "off", "shared_buffers": "256MB", "max_wal_size": "2GB", "log_min_messages": "error"}

_FOLDER = files("pgtrickle.demo")
_TICK = 0.1


def open_shop(server: EmbeddedServer, rows: int) -> str:
    """Create the database with an ordinary role as owner, load the data, and return the DSN."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {ROLE} LOGIN".encode())
        conn.execute(f"CREATE DATABASE {DATABASE} OWNER {ROLE}".encode())
    dsn = server.dsn(DATABASE, ROLE)
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT set_config('demo.rows', %s, true)", [str(rows)])
        conn.execute((_FOLDER / "shop.sql").read_text().encode())
    return dsn


def stream_tables() -> dict[str, str]:
    """The names and queries of the stream tables, sources before their readers."""
    scripts = sorted((_FOLDER / "queries").iterdir(), key=lambda script: script.name)
    return {re.sub(r"^\d+_|\.sql$", "", script.name): script.read_text().strip() for script in scripts}


class Writer:
    """A thread that adds, pays, ships, cancels and deletes orders: a few hundred rows per second."""

    def __init__(self, dsn: str) -> None:
        self.rows = 0
        self.error: Exception | None = None
        self._conn: psycopg.Connection[Any] = psycopg.connect(dsn, application_name="pgtrickle demo writer")
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._random = random.Random(1)
        self._thread = threading.Thread(target=self._work, name="demo-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._conn.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause writing for the block, after waiting for the running transaction."""
        with self._turn:
            yield

    def _work(self) -> None:
        try:
            while not self._over.wait(_TICK):
                with self._turn:
                    self.rows += self._change()
        except Exception as error:  # a thread cannot raise it to the main thread, which checks this attribute
            self.error = error

    def _change(self) -> int:
        counts = []
        with self._conn.transaction():
            counts.append(self._take_orders(self._random.randint(2, 6)))
            for before, after in (("open", "paid"), ("paid", "shipped"), ("open", "cancelled")):
                counts.append(self._move(before, after, self._random.randint(1, 4)))
            counts.append(
                self._run("DELETE FROM orders WHERE id IN (SELECT id FROM orders WHERE status = 'cancelled' LIMIT 1)")
            )
            counts.append(
                self._run(
                    "UPDATE order_items SET quantity = quantity %% 9 + 1 WHERE order_id = (SELECT max(id) - %s FROM orders)",
                    self._random.randint(0, 500),
                )
            )
        return sum(counts)

    def _take_orders(self, number: int) -> int:
        return self._run(
            "WITH taken AS (INSERT INTO orders (customer_id, status) SELECT %s %% (SELECT max(id) FROM customers) + 1,"
            " 'open' FROM generate_series(1, %s) RETURNING id)"
            " INSERT INTO order_items SELECT id, line, 'product ' || (id * 7 + line) %% 100, line, id %% 90 + 0.99"
            " FROM taken CROSS JOIN generate_series(1, 3) AS line",
            self._random.randrange(1_000_000),
            number,
        )

    def _move(self, before: str, after: str, number: int) -> int:
        return self._run(
            "UPDATE orders SET status = %s WHERE id IN (SELECT id FROM orders WHERE status = %s AND id > %s LIMIT %s)",
            after,
            before,
            self._random.randrange(5_000),
            number,
        )

    def _run(self, statement: str, *parameters: object) -> int:
        return self._conn.execute(statement.encode(), parameters).rowcount

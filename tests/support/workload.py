"""A workload that fills the sources of the corpus and changes all of them in rounds, reproducibly for a seed.

Every round uses most kinds of statements, changes some rows several times, moves rows between groups and partitions,
and includes NULL keys and duplicates. Round 4 moves many rows at once, round 5 empties one group of every source, and
round 6 fills it again.
"""

import random
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb
from psycopg.types.range import DateRange

ROUNDS = 8

_REGIONS = ("north", "south", "east", "west", "mid")
_TIERS = ("bronze", "silver", "gold", "platinum")
_STATUSES = ("new", "paid", "sent", "returned")
_TAGS = ("vip", "web", "b2b", "late", "ünï")
_KINDS = ("tool", "toy", "food", "book")
_NOTES = (None, "", "gift", "rush", "Rush ", "50% off", "naïve \\ 'note'")
# Equal values that print differently: a change from one to the other must reach stream tables that show them.
_FACTORS = ("1", "1.0", "1.00", "1.5", "1.50", "0.75")
_READINGS = (None, "NaN", "0", "0.0", "2.5", "2.50", "1e3", "1000", "-7.125", "12345678901234567890.123")
# No negative values: a float sum that cancels to nearly zero cannot be compared with a relative tolerance.
_RATIOS = (None, float("nan"), -0.0, 0.0, 0.5, 1.25, 3.0, 1e10)
_SPANS = ("1 day", "24 hours", "1 mon", "30 days", "90 minutes")
# The groups that round 5 empties and round 6 refills.
EMPTIED_REGION, EMPTIED_STATUS, EMPTIED_SKU, EMPTIED_SLOT = "mid", "returned", "sku-03", 3

Connection = psycopg.Connection[Any]
Row = Sequence[Any]

_INSERT_CUSTOMER = "INSERT INTO shop.customers VALUES (%s, %s, %s, %s, %s, %s, %s)"
_INSERT_ORDER = "INSERT INTO shop.orders VALUES (%s, %s, %s, %s, %s, %s, %s)"
_INSERT_ITEM = "INSERT INTO shop.items VALUES (%s, %s, %s, %s, %s)"
_INSERT_PRODUCT = "INSERT INTO shop.products VALUES (%s, %s::shop.product_kind, %s, ROW(%s, %s, %s)::shop.box, %s, %s)"
_INSERT_EVENT = "INSERT INTO shop.events VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s::interval)"


class Workload:
    """Changes to the sources of the corpus. A round depends only on the seed, its number and the data."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = random.Random(seed)
        self._next_id = 1

    def load(self, conn: Connection) -> None:
        """Fill the empty sources."""
        self._rng = random.Random(f"{self.seed}:load")
        with conn.transaction(), conn.cursor() as cur:
            cur.executemany(_INSERT_CUSTOMER, [self._customer(i) for i in range(1, 51)])
            cur.executemany(_INSERT_ORDER, [self._order(i) for i in range(1, 121)])
            cur.executemany(_INSERT_PRODUCT, [self._product(f"sku-{i:02}") for i in range(1, 21)])
            cur.executemany(_INSERT_EVENT, [self._event(i) for i in range(1, 101)])
            cur.executemany(_INSERT_ITEM, self._duplicated([self._item() for _ in range(150)]))
            for code in _REGIONS:
                cur.execute(
                    "INSERT INTO shop.regions VALUES (%s, %s, %s, %s::numeric, %s)",
                    [code, code.title(), self._rng.randint(1, 50), self._rng.choice(_FACTORS), self._money(10)],
                )

    def round(self, conn: Connection, n: int) -> None:
        """Apply round `n` (1 to 8) to loaded sources, as several committed transactions; `conn` is in autocommit."""
        self._rng = random.Random(f"{self.seed}:{n}")
        # Ids that no earlier round has used, so that a round needs no state from the earlier ones.
        self._next_id = 1000 * n
        self._change_customers(conn)
        self._change_orders(conn)
        self._change_items(conn)
        self._change_products(conn)
        self._change_events(conn)
        self._change_regions(conn, n)
        self._undone(conn)
        if n == 4:
            self._move_many(conn)
        if n == 5:
            self._empty_groups(conn)
        if n == 6:
            self._refill_groups(conn)

    # --- rows ---

    def _customer(self, key: int, region: str | None = None) -> Row:
        rng = self._rng
        return (
            key,
            region or rng.choice((*_REGIONS, "nowhere", None)),
            rng.choice(_TIERS),
            rng.choice((None, self._money(5000), self._money(5000))),
            date(2024, 1, 1) + timedelta(days=rng.randrange(700)),
            rng.sample(_TAGS, rng.randrange(4)),
            rng.choice((None, "A", "B", "AB")),
        )

    def _order(self, key: int, status: str | None = None) -> Row:
        rng = self._rng
        return (
            key,
            rng.choice((None, *[rng.randint(1, 60) for _ in range(9)])),
            status or rng.choice(_STATUSES),
            rng.choice((None, *[self._money(400) for _ in range(9)])),
            rng.randint(1, 12),
            datetime(2025, 1, 1, tzinfo=UTC) + timedelta(minutes=rng.randrange(500_000)),
            rng.choice(_NOTES),
        )

    def _item(self, sku: str | None = None) -> Row:
        rng = self._rng
        return (
            rng.choice((None, *[rng.randint(1, 130) for _ in range(12)])),
            sku or rng.choice((None, *[f"sku-{rng.randint(1, 22):02}" for _ in range(12)])),
            rng.randint(1, 5),
            self._money(90),
            rng.choice((None, rng.random() * 50, rng.random() * 50)),
        )

    def _product(self, sku: str) -> Row:
        rng = self._rng
        attrs = {"color": rng.choice(("red", "blue", None)), "stock": rng.randrange(50), "sizes": ["s", "m"]}
        start = date(2025, 1, 1) + timedelta(days=rng.randrange(200))
        life = DateRange(start, start + timedelta(days=rng.randrange(1, 300)))
        box = (rng.randint(1, 9), rng.randint(1, 9), self._money(20))
        ratings = rng.choice((None, [], [rng.randint(1, 5) for _ in range(3)]))
        return (sku, rng.choice(_KINDS), Jsonb(attrs), *box, ratings, life)

    def _event(self, key: int, slot: int | None = None) -> Row:
        rng = self._rng
        reading = rng.choice(_READINGS)
        return (
            key,
            rng.choice((None, *range(12))) if slot is None else slot,
            rng.choice((None, *[rng.randint(1, 60) for _ in range(5)])),
            rng.choice((None, True, False)),
            UUID(int=rng.randrange(8)),
            None if reading is None else Decimal(reading),
            rng.choice(_RATIOS),
            bytes(rng.randrange(256) for _ in range(rng.randrange(3))),
            rng.choice(_SPANS),
        )

    def _money(self, most: int) -> Decimal:
        return Decimal(self._rng.randrange(1, most * 100)).scaleb(-2)

    def _duplicated(self, rows: list[Row]) -> list[Row]:
        return rows + self._rng.sample(rows, len(rows) // 3)

    def _new_ids(self, count: int) -> range:
        first, self._next_id = self._next_id, self._next_id + count
        return range(first, first + count)

    def _pick(self, conn: Connection, table: str, count: int) -> list[Any]:
        """Random keys of a table. They depend on the seed and not on the order in which PostgreSQL returns rows."""
        key = "sku" if table == "products" else "id"
        query = sql.SQL("SELECT DISTINCT {key} FROM {table} ORDER BY {key}").format(
            key=sql.Identifier(key), table=sql.Identifier("shop", table)
        )
        keys = [row[0] for row in conn.execute(query).fetchall()]
        return self._rng.sample(keys, min(count, len(keys)))

    # --- changes, one source each ---

    def _change_customers(self, conn: Connection) -> None:
        rng = self._rng
        with conn.transaction(), conn.cursor() as cur:
            # A multi-row INSERT, of which one row is updated twice and one is deleted, all in one transaction.
            first, second, gone = rows = [self._customer(key) for key in self._new_ids(3)]
            cur.execute(
                _INSERT_CUSTOMER + ", (%s, %s, %s, %s, %s, %s, %s)" * 2,
                [value for row in rows for value in row],
            )
            cur.execute("UPDATE shop.customers SET region = NULL WHERE id = ANY (%s)", [[first[0], second[0]]])
            cur.execute("UPDATE shop.customers SET region = 'north', tags = tags || '{new}' WHERE id = %s", [first[0]])
            cur.execute("DELETE FROM shop.customers WHERE id = %s", [gone[0]])
        for key in self._pick(conn, "customers", 6):
            row = self._customer(key)
            conn.execute(
                "UPDATE shop.customers SET region = %s, tier = %s, grade = %s WHERE id = %s",
                [row[1], row[2], row[6], key],
            )
        for key in [*self._pick(conn, "customers", 2), rng.randint(1, 60)]:
            conn.execute(
                _INSERT_CUSTOMER + " ON CONFLICT (id) DO UPDATE"
                " SET credit = coalesce(customers.credit, 0) + 10, joined = excluded.joined",
                self._customer(key),
            )
        conn.execute("DELETE FROM shop.customers WHERE id = ANY (%s)", [self._pick(conn, "customers", 3)])

    def _change_orders(self, conn: Connection) -> None:
        rng = self._rng
        _copy(conn, "COPY shop.orders FROM STDIN", [self._order(key) for key in self._new_ids(14)])
        for key in self._pick(conn, "orders", 6):
            # Update the same row in three transactions; the last value may equal the first.
            for status in rng.choices(_STATUSES, k=3):
                conn.execute("UPDATE shop.orders SET status = %s WHERE id = %s", [status, key])
        with conn.transaction():
            keys = self._pick(conn, "orders", 10)
            conn.execute("UPDATE shop.orders SET customer_id = NULL WHERE id = ANY (%s)", [keys[:2]])
            (customer,) = self._pick(conn, "customers", 1)
            conn.execute("UPDATE shop.orders SET customer_id = %s WHERE id = ANY (%s)", [customer, keys[2:6]])
            conn.execute("UPDATE shop.orders SET amount = amount + 1.25, qty = qty + 1 WHERE id = ANY (%s)", [keys[5:]])
        for key in [*self._pick(conn, "orders", 3), *self._new_ids(2)]:
            conn.execute(
                "MERGE INTO shop.orders AS o USING (VALUES (%s::int, %s::int, %s::text, %s::numeric, %s::int,"
                " %s::timestamptz, %s::text)) AS n (id, customer_id, status, amount, qty, placed, note) ON o.id = n.id"
                " WHEN MATCHED AND n.qty > 10 THEN DELETE"
                " WHEN MATCHED THEN UPDATE SET amount = n.amount, placed = n.placed, note = n.note"
                " WHEN NOT MATCHED THEN"
                " INSERT VALUES (n.id, n.customer_id, n.status, n.amount, n.qty, n.placed, n.note)",
                self._order(key),
            )
        again = self._new_ids(5)
        conn.execute(
            "WITH gone AS (DELETE FROM shop.orders WHERE id = ANY (%s) RETURNING *)"
            " INSERT INTO shop.orders SELECT %s + row_number() OVER (ORDER BY id), customer_id, 'new', amount, qty,"
            " placed, 'again' FROM gone",
            [self._pick(conn, "orders", 4), again.start],
        )
        conn.execute("DELETE FROM shop.orders WHERE id = ANY (%s)", [self._pick(conn, "orders", 12)])

    def _change_items(self, conn: Connection) -> None:
        rng = self._rng
        _copy(conn, "COPY shop.items FROM STDIN", self._duplicated([self._item() for _ in range(15)]))
        for key in self._pick(conn, "orders", 6):
            conn.execute(_INSERT_ITEM, [key, *self._item()[1:]])
        with conn.transaction():
            # Duplicate existing rows; then delete one of each pair of duplicates.
            conn.execute(
                "INSERT INTO shop.items SELECT * FROM shop.items WHERE order_id %% 9 = %s OR order_id IS NULL"
                " ORDER BY price, order_id, sku, qty, weight LIMIT 15",
                [rng.randrange(9)],
            )
            conn.execute(
                "DELETE FROM shop.items WHERE ctid IN (SELECT min(ctid) FROM shop.items WHERE qty <> 1"
                " GROUP BY order_id, sku, qty, price, weight HAVING count(*) > 1"
                " ORDER BY order_id, sku, qty, price, weight LIMIT 12)"
            )
        conn.execute("UPDATE shop.items SET order_id = NULL WHERE order_id %% 40 = %s", [rng.randrange(40)])
        conn.execute("UPDATE shop.items SET order_id = %s WHERE order_id IS NULL AND qty = 2", [rng.randint(1, 130)])
        conn.execute("UPDATE shop.items SET price = price + 0.10 WHERE sku = %s", [f"sku-{rng.randint(1, 20):02}"])
        conn.execute("DELETE FROM shop.items WHERE order_id = ANY (%s)", [[rng.randint(1, 130) for _ in range(16)]])
        conn.execute("DELETE FROM shop.items WHERE sku IS NULL AND qty = %s", [rng.randint(1, 5)])

    def _change_products(self, conn: Connection) -> None:
        rng = self._rng
        sku = f"new-{self._new_ids(1).start}"
        with conn.transaction():
            conn.execute(_INSERT_PRODUCT, self._product(sku))
            conn.execute("UPDATE shop.products SET kind = 'toy', ratings = ratings || 5 WHERE sku = %s", [sku])
        for key in self._pick(conn, "products", 4):
            row = self._product(key)
            conn.execute(
                "UPDATE shop.products SET kind = %s::shop.product_kind, attrs = %s, life = %s WHERE sku = %s",
                [row[1], row[2], row[7], key],
            )
        conn.execute(
            "UPDATE shop.products SET attrs = jsonb_set(attrs, '{stock}', to_jsonb(%s::numeric)), size.width = %s,"
            " ratings = %s WHERE sku = ANY (%s)",
            [rng.choice(("1.0", "1.00", "7")), rng.randint(1, 9), [rng.randint(1, 5)], self._pick(conn, "products", 3)],
        )
        conn.execute("DELETE FROM shop.products WHERE sku = ANY (%s)", [self._pick(conn, "products", 1)])

    def _change_events(self, conn: Connection) -> None:
        rng = self._rng
        with conn.transaction(), conn.cursor() as cur:
            cur.executemany(_INSERT_EVENT, self._duplicated([self._event(key) for key in self._new_ids(12)]))
            # Move rows across partitions, to the default one and back.
            cur.execute("UPDATE shop.events SET slot = %s WHERE slot = %s", [rng.randrange(12), rng.randrange(12)])
            cur.execute("UPDATE shop.events SET slot = %s WHERE slot IS NULL AND ok", [rng.randrange(4)])
            cur.execute(
                "UPDATE shop.events SET slot = NULL, ok = NOT ok WHERE id = ANY (%s)",
                [self._pick(conn, "events", 3)],
            )
        for key in self._pick(conn, "events", 8):
            row = self._event(key)
            conn.execute(
                "UPDATE shop.events SET reading = %s, ratio = %s, span = %s::interval, customer_id = %s WHERE id = %s",
                [row[5], row[6], row[8], row[2], key],
            )
        conn.execute("DELETE FROM shop.events WHERE id = ANY (%s)", [self._pick(conn, "events", 12)])

    def _change_regions(self, conn: Connection, n: int) -> None:
        rng = self._rng
        new = f"zone-{n}"
        conn.execute("INSERT INTO shop.regions VALUES (%s, %s, %s, 1, NULL)", [new, "Mid", rng.randint(1, 50)])
        conn.execute("DELETE FROM shop.regions WHERE code = %s", [f"zone-{n - 2}"])
        for code in rng.sample(_REGIONS, 2):
            conn.execute(
                "UPDATE shop.regions SET factor = %s::numeric, tax = %s, manager_id = %s WHERE code = %s",
                [rng.choice(_FACTORS), self._money(10), rng.randint(1, 50), code],
            )
        # With a NULL in its list, NOT IN returns no rows instead of most of them; every other round has one.
        conn.execute("UPDATE shop.regions SET manager_id = coalesce(manager_id, 1)")
        if n % 2 == 0:
            conn.execute("UPDATE shop.regions SET manager_id = NULL WHERE code = %s", [new])
        conn.execute(
            "UPDATE shop.customers SET region = %s WHERE id = ANY (%s)", [new, self._pick(conn, "customers", 3)]
        )

    # --- rolled-back changes, and special rounds ---

    def _undone(self, conn: Connection) -> None:
        with conn.transaction():
            conn.execute("UPDATE shop.orders SET qty = qty + 1 WHERE id = ANY (%s)", [self._pick(conn, "orders", 2)])
            with conn.transaction(force_rollback=True):
                conn.execute("DELETE FROM shop.orders")
                conn.execute("UPDATE shop.items SET qty = 0")
            conn.execute(_INSERT_ITEM, self._item())
        with conn.transaction(force_rollback=True):
            conn.execute("DELETE FROM shop.customers")
            conn.execute("INSERT INTO shop.regions VALUES ('aborted', 'Aborted', NULL, 9, NULL)")

    def _move_many(self, conn: Connection) -> None:
        conn.execute(
            "UPDATE shop.orders SET customer_id = CASE WHEN id % 5 = 0 THEN NULL ELSE id % 50 + 1 END WHERE id % 2 = 0"
        )
        conn.execute("UPDATE shop.events SET slot = (slot + 5) % 12 WHERE id % 2 = 0")
        conn.execute("UPDATE shop.items SET order_id = order_id + 1 WHERE qty < 3")

    def _empty_groups(self, conn: Connection) -> None:
        conn.execute("DELETE FROM shop.orders WHERE status = %s", [EMPTIED_STATUS])
        conn.execute("DELETE FROM shop.items WHERE sku = %s", [EMPTIED_SKU])
        conn.execute("DELETE FROM shop.events WHERE slot = %s", [EMPTIED_SLOT])
        conn.execute("DELETE FROM shop.customers WHERE region = %s", [EMPTIED_REGION])
        conn.execute("DELETE FROM shop.regions WHERE code = %s", [EMPTIED_REGION])
        conn.execute("DELETE FROM shop.products WHERE kind = 'book'")

    def _refill_groups(self, conn: Connection) -> None:
        with conn.transaction(), conn.cursor() as cur:
            cur.execute("INSERT INTO shop.regions VALUES (%s, 'Mid', 7, 1.50, 3)", [EMPTIED_REGION])
            cur.executemany(_INSERT_CUSTOMER, [self._customer(key, EMPTIED_REGION) for key in self._new_ids(6)])
            cur.executemany(_INSERT_ORDER, [self._order(key, EMPTIED_STATUS) for key in self._new_ids(15)])
            cur.executemany(_INSERT_ITEM, [self._item(EMPTIED_SKU) for _ in range(8)])
            cur.executemany(_INSERT_EVENT, [self._event(key, EMPTIED_SLOT) for key in self._new_ids(8)])
            books = [self._product(f"book-{key}") for key in self._new_ids(4)]
            cur.executemany(_INSERT_PRODUCT, [(sku, "book", *rest) for sku, _, *rest in books])


def _copy(conn: Connection, statement: str, rows: Iterable[Row]) -> None:
    with conn.cursor() as cur, cur.copy(statement.encode()) as copy:
        for row in rows:
            copy.write_row(row)

"""The refresh broker: one service reads the changes of a database's tables on behalf of all databases that need them.

Services elect it with a lease in the database whose tables are read. A refresh that gets no shared cut in time takes
its own cut and scans the buffers itself, as if there were no broker.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from secrets import token_urlsafe

import psycopg
import pyarrow as pa
from psycopg.types.json import Jsonb

from pgtrickle.errors import PgtrickleError
from pgtrickle.service.broker.flight import FlightServer, request_shared_cut
from pgtrickle.service.broker.publisher import Publisher
from pgtrickle.service.config import BrokerConfig
from pgtrickle.sites.remote.connections import Connections, errors_naming
from pgtrickle.sites.shared_cut import Interest, SharedCut

log = logging.getLogger("pgtrickle.broker")

PATIENCE = 0.5  # ticks that a consumer waits for a shared cut before it falls back: it must not miss two ticks
LEAST_PATIENCE, MOST_PATIENCE = 1.0, 10.0  # seconds; but never more than a tick
LEADER_SECONDS = 1.0  # for which the broker's identity is cached
SHUN_SECONDS = 5.0  # for which a broker that did not answer is not asked again
FULL_SECONDS = 60.0  # for which nothing is registered with a broker whose registry is full
AGAIN_SECONDS = 10.0  # after which an interest that is not served is registered again


@dataclass(frozen=True)
class _Leader:
    service_id: uuid.UUID
    address: str
    token: str


@dataclass
class Broker:
    """A service as broker and as consumer: shares cuts of databases where it is elected, requests them from others."""

    service_id: uuid.UUID
    connections: Connections
    lease_seconds: float
    config: BrokerConfig = field(default_factory=BrokerConfig)

    def __post_init__(self) -> None:
        self._publishers: dict[str, Publisher] = {}
        self._leaders: dict[str, _Leader | None] = {}
        self._asked: dict[str, float] = {}
        self._sent: dict[tuple[str, str, str], tuple[float, set[str]]] = {}
        self._full: dict[str, float] = {}
        self._lock = threading.Lock()
        self._flight: FlightServer | None = None
        self._tokens: dict[str, str] = {}  # by DSN: a token that is read in one database must not be valid for another
        self._intervals: dict[str, float] = {}
        self._shunned: dict[str, float] = {}
        self._deaf_until = 0.0

    def serve(self, name: str, dsn: str, interval: float) -> None:
        """Stand for election in a remote database that stream tables here read."""
        with self._lock:
            if self._flight is None and not self._listen_again():
                return
            assert self._flight is not None
            interval = self._intervals[dsn] = min(interval, self._intervals.get(dsn, interval))
            publisher = self._publishers.get(dsn)
            if publisher is None or not publisher.alive:
                self._publishers[dsn] = Publisher(
                    name,
                    dsn,
                    self.service_id,
                    self._flight.address,
                    self._tokens.setdefault(dsn, token_urlsafe(32)),
                    self.lease_seconds,
                    self.connections,
                    interval,
                )
                return
            publisher.asked, publisher.interval = time.monotonic(), interval

    def _listen_again(self) -> bool:
        """Start the Flight server; False if it cannot listen, so that every database reads for itself."""
        if time.monotonic() < self._deaf_until:
            return False
        try:
            self._flight = FlightServer(self.config, self._publisher_of)
        except (pa.ArrowException, OSError) as error:
            log.warning("cannot be a broker at %s: %s", self.config.listen, error)
            self._deaf_until = time.monotonic() + FULL_SECONDS
            return False
        return True

    def stop(self) -> None:
        for publisher in self._publishers.values():
            publisher.stop()
        if self._flight is not None:
            self._flight.stop()

    def _publisher_of(self, token: str) -> Publisher | None:
        """The publisher that has stored this token in the catalog of its database."""
        publishers = [publisher for publisher in list(self._publishers.values()) if publisher.alive]
        return next(
            (publisher for publisher in publishers if compare_digest(publisher.token.encode(), token.encode())), None
        )

    # -- the protocol `Brokers`, which engines use
    # -----------------------------------------------------------------------

    def shared_cut(self, database: str, dsn: str, node: str, consumers: Sequence[str]) -> SharedCut | None:
        try:
            return self._shared_cut(database, dsn, node, consumers)
        except (psycopg.Error, PgtrickleError) as error:
            log.info("the broker is unknown: %s", error, extra={"database": database})
            return None

    def _shared_cut(self, database: str, dsn: str, node: str, consumers: Sequence[str]) -> SharedCut | None:
        tick = self._intervals.get(dsn, 1.0)
        seconds = min(max(tick * PATIENCE, LEAST_PATIENCE), MOST_PATIENCE, tick)
        leader = self._leader(database, dsn)
        if leader is None or time.monotonic() < self._shunned.get(leader.address, 0.0):
            return None
        if leader.service_id == self.service_id:
            publisher = self._publishers.get(dsn)
            return (
                publisher.shared_cut(consumers, seconds)
                if publisher is not None and publisher.alive and publisher.node == node
                else None
            )
        shared_cut = request_shared_cut(leader.address, leader.token, node, consumers, seconds, self.config.ca)
        if shared_cut is None:
            self._shunned[leader.address] = time.monotonic() + SHUN_SECONDS
        return shared_cut

    def want(
        self,
        database: str,
        dsn: str,
        home: str,
        label: str,
        wanted: Mapping[str, Interest],
        settings: Mapping[str, str],
    ) -> None:
        if time.monotonic() - self._full.get(dsn, -FULL_SECONDS) < FULL_SECONDS:
            return
        for name, interest in wanted.items():
            at, sent = self._sent.get((dsn, home, name), (0.0, set[str]()))
            texts = {f"{text} {type_}" for text, type_ in interest.expressions.items()} | interest.conditions
            if texts <= sent and time.monotonic() - at < AGAIN_SECONDS:
                continue
            values = (Jsonb(interest.expressions), Jsonb(sorted(interest.conditions)), Jsonb(dict(settings)))
            try:
                with self.connections.open(database, dsn) as conn, errors_naming(database):
                    row = conn.execute(
                        "SELECT pgtrickle._register_interest(%s, %s, %s, %s, %s, %s)", (home, label, name, *values)
                    ).fetchone()
            except (psycopg.Error, PgtrickleError) as error:
                log.warning("could not subscribe to the broker: %s", error, extra={"database": database})
                return
            assert row is not None
            if not row[0]:
                log.warning(
                    "the broker's registry is full, %s does not fit: each database reads its changes itself",
                    name,
                    extra={"database": database},
                )
                self._full[dsn] = time.monotonic()
                return
            self._sent[dsn, home, name] = (time.monotonic(), sent | texts)

    def _leader(self, database: str, dsn: str) -> _Leader | None:
        known = self._leaders.get(dsn)
        if dsn in self._leaders and time.monotonic() - self._asked[dsn] < LEADER_SECONDS:
            return known
        with self.connections.open(database, dsn) as conn, errors_naming(database):
            row = conn.execute(
                "SELECT service_id, address, token FROM pgtrickle.pgt_broker WHERE lease_expires > clock_timestamp()"
            ).fetchone()
        self._asked[dsn] = time.monotonic()
        self._leaders[dsn] = _Leader(*row) if row is not None else None
        return self._leaders[dsn]

"""The pg_trickle.* settings of one database, as the service uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pgtrickle.catalog.query_files import load_query
from pgtrickle.postgres.connection import is_pooled
from pgtrickle.refresh.failures import Policy
from pgtrickle.service.scheduling.fair_queue import Share

IDLE_IN_APPLY = "60s"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Settings:
    """A database's settings. They are read at every tick, so that a change does not require a restart."""

    values: Mapping[str, str]
    wrong: Mapping[str, str] = field(default_factory=dict)  # invalid values, which are ignored
    attached: Mapping[str, str] = field(
        default_factory=dict
    )  # by ALTER DATABASE or ALTER ROLE: a session keeps the values it started with
    paused: bool = False

    @property
    def enabled(self) -> bool:
        return self._on("enabled")

    @property
    def interval(self) -> float:
        return self._number("scheduler_interval_ms") / 1000

    @property
    def wakes(self) -> bool:
        """Whether to wake early on NOTIFY."""
        return self._on("event_driven_wake")

    @property
    def pooler(self) -> str:
        """The configured mode of a pooler in front of the server: off (none is configured), session or transaction."""
        return self.values["connection_pooler_mode"]

    def listens(self, conn: psycopg.Connection[Any]) -> bool:
        """Whether this connection can receive notifications. Behind a pooler in transaction mode it cannot."""
        return self.pooler == "session" or (self.pooler == "off" and not is_pooled(conn))

    @property
    def brokered(self) -> bool:
        """Whether changes in remote databases are read through a broker."""
        return self._on("enable_refresh_broker")

    @property
    def tiered(self) -> bool:
        return self._on("tiered_scheduling")

    @property
    def workers(self) -> int:
        return self._number("max_dynamic_refresh_workers")

    @property
    def share(self) -> Share:
        cap = self._number("max_concurrent_refreshes") if self._on("parallel_refresh_mode") else 1
        return Share(cap, self._number("per_database_worker_quota"))

    @property
    def policy(self) -> Policy:
        return Policy(self._number("max_consecutive_errors"), self._on("auto_backoff"), IDLE_IN_APPLY)

    @property
    def history_days(self) -> int:
        return self._number("history_retention_days")

    @property
    def verify_seconds(self) -> int | None:
        """The time between two comparisons of a stream table with its query; None for never."""
        text = self.values["verify_interval"]
        return int(text[:-1]) * _UNITS[text[-1]] if text != "0" else None

    @property
    def verify_percent(self) -> int:
        """The share of the service's time that these comparisons may take."""
        return self._number("verify_budget_percent")

    @property
    def buffer_alert(self) -> int:
        return self._number("buffer_alert_threshold")

    @property
    def most_databases(self) -> int:
        return self._number("max_databases")

    def _on(self, name: str) -> bool:
        return self.values[name] == "on"

    def _number(self, name: str) -> int:
        return int(self.values[name])


def read_settings(conn: psycopg.Connection[Any]) -> Settings:
    """The current settings of the connected database."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(load_query("settings")).fetchone()
    assert row is not None
    return Settings(row["settings"], row["wrong"] or {}, row["attached"] or {}, row["paused"])

"""The service's log at debug level shows each refresh from its claim to its commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg

import pgtrickle
from pgtrickle.service.config import ServerConfig
from tests.support.database import TestDatabase
from tests.support.service import fresh
from tests.support.service_process import ServiceProcess

STAGES = ["claim", "plan", "cut", "decide", "fetch", "compute", "apply"]


def test_the_log_alone_shows_a_refresh(database: TestDatabase, conn: psycopg.Connection[Any], tmp_path: Path) -> None:
    conn.execute("CREATE TABLE item (id int PRIMARY KEY, secret text)")
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.create_stream_table("kept", "SELECT id, secret FROM item", schedule="100ms", initialize=False)
    server = ServerConfig("test", database.dsn, (database.name,))
    with ServiceProcess(tmp_path, server, log_level="debug") as service:
        fresh(conn, "kept")
        conn.execute("INSERT INTO item VALUES (1, 'not for logs')")
        fresh(conn, "kept")
        log = service.log_path.read_text(encoding="utf-8")
    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    refreshes: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry.get("stream_table") == "public.kept":
            refreshes.setdefault(entry["claim"], []).append(entry)
    changed = [entries for entries in refreshes.values() if entries[-1]["figures"].get("inserted") == 1]
    assert [entry["stage"] for entry in changed[0]] == STAGES
    assert {entry["level"] for entry in changed[0]} == {"debug"}
    assert changed[0][3]["figures"]["action"] == "DIFFERENTIAL"
    assert "not for logs" not in log

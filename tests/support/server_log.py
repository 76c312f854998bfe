"""The statements in the server's log, with the application that sent them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

from tests.support.database import TestDatabase

# The log_line_prefix in `SERVER_SETTINGS`: time, process, database and application_name at the time of the statement.
_ENTRY = re.compile(
    r"^\d{4}-\d\d-\d\d [^[]*\[\d+\] (?:(?P<database>[^|]*)\|(?P<application>[^|]*)\| )?(?P<level>[A-Z]+):  "
)
_STATEMENT = re.compile(r"(?P<how>statement|execute [^:]*): (?P<text>.*)", re.DOTALL)


class ServerLog:
    """The statements that a database has received since the recording began."""

    def __init__(self, database: TestDatabase, start: int) -> None:
        self._database = database
        self._start = start

    def statements(self) -> Iterator[tuple[str, str]]:
        """Every logged statement with the application_name it ran under, in order."""
        for application, _, text in self.sent():
            yield application, text

    def sent(self) -> Iterator[tuple[str, str, str]]:
        """The same, including how each was sent.

        That is `statement`, `execute <unnamed>`, or `execute` and the name of a prepared statement.
        """
        with self._database.server.log_path.open("rb") as log:
            log.seek(self._start)
            text = log.read().decode()
        for entry in _entries(text):
            match = _ENTRY.match(entry)
            if match is None or match["database"] != self._database.name or match["level"] != "LOG":
                continue
            statement = _STATEMENT.fullmatch(entry[match.end() :])
            if statement is not None:
                yield match["application"], statement["how"], statement["text"]


def _entries(text: str) -> Iterator[str]:
    """The entries of the log; continuation lines begin with a tab."""
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith("\t"):
            lines.append(line[1:])
            continue
        if lines:
            yield "\n".join(lines)
        lines = [line]
    yield "\n".join(lines)


@contextmanager
def recorded(database: TestDatabase) -> Iterator[ServerLog]:
    """Log all statements of sessions that connect to this database within the block."""
    name = sql.Identifier(database.name)
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("ALTER DATABASE {} SET log_statement = 'all'").format(name))
        yield ServerLog(database, database.server.log_path.stat().st_size)
        conn.execute(sql.SQL("ALTER DATABASE {} RESET log_statement").format(name))

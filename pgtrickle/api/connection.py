"""Connections of the Python API and the command line: where the DSN comes from, and clear errors."""

from __future__ import annotations

import logging
import os
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgtrickle.errors import ConnectionFailedError
from pgtrickle.postgres.connection import connect as open_connection

log = logging.getLogger("pgtrickle.api")
DSN_VARIABLE = "PGTRICKLE_DSN"
CONNECT_SECONDS = 15


def open_from(dsn: str | None) -> psycopg.Connection[Any]:
    """Open a connection to the DSN, the one in the environment, or libpq's defaults; log the server's warnings."""
    dsn = dsn or os.environ.get(DSN_VARIABLE) or ""
    try:
        known = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's message repeats the DSN, which may contain a password.
        raise ConnectionFailedError(
            "PostgreSQL cannot parse the DSN",
            "Write it as postgresql://user@host/database, or as key=value pairs.",
        ) from None
    if "@" in str(known.get("host", "")):
        # An unescaped @ in the password: what follows it would be printed as part of the host name.
        raise ConnectionFailedError("the DSN has an @ in its host", "Write an @ in a password as %40.")
    limits = (
        {} if "connect_timeout" in known or "PGCONNECT_TIMEOUT" in os.environ else {"connect_timeout": CONNECT_SECONDS}
    )
    try:
        conn = open_connection(dsn, application_name="pgtrickle", **limits)
    except psycopg.OperationalError as error:
        shown = {name: value for name, value in known.items() if name in {"host", "port", "dbname", "user"}}
        where = " ".join(f"{name}={value}" for name, value in shown.items()) or "libpq's defaults"
        remedy = (
            "Check that the server runs and accepts connections from here, and that the database and the role exist."
            if known
            else f"Give a DSN with --dsn or {DSN_VARIABLE}, such as postgresql://user@host/database."
        )
        raise ConnectionFailedError(f"cannot connect to {where}: {str(error).strip()}", remedy) from error
    conn.add_notice_handler(log_warning)
    return conn


def is_worth_telling(diagnostic: psycopg.errors.Diagnostic) -> bool:
    """Whether a message of the server is a warning that the user should see.

    The warning that no service is running is meant for SQL users. Python and command-line users can refresh themselves.
    """
    about_service = "no pgtrickle service" in (diagnostic.message_primary or "")
    return diagnostic.severity_nonlocalized == "WARNING" and not about_service


def log_warning(diagnostic: psycopg.errors.Diagnostic) -> None:
    """Log a warning of the server."""
    if is_worth_telling(diagnostic):
        hint = f" ({diagnostic.message_hint})" if diagnostic.message_hint else ""
        log.warning("%s%s", diagnostic.message_primary, hint)

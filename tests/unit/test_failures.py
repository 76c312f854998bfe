"""Which failures come again by themselves."""

from __future__ import annotations

import psycopg
import pytest

from pgtrickle.engine.failures import is_transient, pause_after
from pgtrickle.errors import FuseBlownError, PrivilegeError, RefreshConflictError, RefreshError, SourceLockedError


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (psycopg.errors.LockNotAvailable(), True),
        (psycopg.errors.DeadlockDetected(), True),
        (psycopg.errors.SerializationFailure(), True),
        (psycopg.errors.AdminShutdown(), True),
        (psycopg.errors.TooManyConnections(), True),
        (psycopg.errors.DiskFull(), True),
        (psycopg.OperationalError("server closed the connection unexpectedly"), True),
        (SourceLockedError("locked", None), True),
        (RefreshConflictError("taken", None), True),
        (psycopg.errors.DivisionByZero(), False),
        (psycopg.errors.UniqueViolation(), False),
        (psycopg.errors.UndefinedTable(), False),
        (RefreshError("Spark", None), False),
        (FuseBlownError("fuse", None), False),
        (PrivilegeError("rights", None), False),
        (KeyboardInterrupt(), False),
        (None, False),
    ],
)
def test_transient(error: BaseException | None, transient: bool) -> None:
    assert is_transient(error) is transient


def test_pauses_grow_up_to_a_minute_and_differ() -> None:
    for errors, longest in ((1, 2.0), (2, 4.0), (5, 32.0), (6, 60.0), (1000, 60.0)):
        pauses = [pause_after(errors) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest

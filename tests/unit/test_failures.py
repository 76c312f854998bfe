"""The kind of failure of each error, and the kinds that are retried automatically."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors

from pgtrickle.errors import (
    DatabaseFailedError,
    FuseBlownError,
    InvalidQueryError,
    PrivilegeError,
    RefreshConflictError,
    RefreshError,
    SourceChangedError,
    SourceLockedError,
)
from pgtrickle.refresh.failures import (
    _CLASSES,
    _STATES,
    RETRIED,
    Kind,
    answers_requests,
    is_retried,
    kind_of,
    kind_of_state,
    pause_after,
)

# Every SQLSTATE that psycopg knows.
STATES = {
    error.sqlstate
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, psycopg.Error) and error.sqlstate is not None
}


def test_every_class_of_sqlstate_has_its_kind() -> None:
    assert len(STATES) > 200
    assert {state[:2] for state in STATES} == set(_CLASSES)
    assert set(_STATES) <= STATES


def test_only_these_sqlstates_are_retried() -> None:
    assert {state for state in STATES if is_retried(kind_of_state(state))} == {
        # connections, shutdowns, a server that became a standby, too many connections, a process that stood still
        *("08000", "08001", "08003", "08004", "08006", "08007", "08P01"),
        *("57000", "57P01", "57P02", "57P03", "57P04", "57P05", "25006", "25P03", "53300", "HV00N"),
        # conflicts and locks
        *("40000", "40001", "40003", "40P01", "55P03", "55006", "72000"),
        # room on the disk, and memory
        *("53000", "53100", "53200", "58030", "HV001"),
    }


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("55P03", Kind.LOCK),
        ("40P01", Kind.LOCK),
        ("40001", Kind.SERIALIZATION),
        ("57P01", Kind.CONNECTION),
        ("08006", Kind.CONNECTION),
        ("25006", Kind.CONNECTION),
        ("42501", Kind.PRIVILEGE),
        ("28P01", Kind.PRIVILEGE),
        ("22012", Kind.DATA),
        ("21000", Kind.DATA),
        ("53100", Kind.DISK),
        ("53200", Kind.MEMORY),
        ("53400", Kind.LIMIT),
        ("54001", Kind.LIMIT),
        ("42P01", Kind.DEFINITION),
        ("57014", Kind.CANCELED),
        ("P0001", Kind.FUNCTION),
        ("XX000", Kind.OTHER),
        ("ZZ999", Kind.OTHER),  # a user's own
    ],
)
def test_kinds_of_states(state: str, kind: Kind) -> None:
    assert kind_of_state(state) is kind


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.LockNotAvailable(), Kind.LOCK),
        (errors.ConfigurationLimitExceeded(), Kind.LIMIT),
        (psycopg.OperationalError("server closed the connection unexpectedly"), Kind.CONNECTION),
        (psycopg.ProgrammingError("the last operation didn't produce records"), Kind.OTHER),
        (SourceLockedError("locked", None), Kind.LOCK),
        (RefreshConflictError("taken", None), Kind.SERIALIZATION),
        (DatabaseFailedError("gone", None), Kind.CONNECTION),
        (SourceChangedError("partitions keep changing", None), Kind.SOURCE),
        (PrivilegeError("rights", None), Kind.PRIVILEGE),
        (InvalidQueryError("query", None), Kind.DEFINITION),
        (FuseBlownError("fuse", None), Kind.FUSE),
        (RefreshError("Spark", None), Kind.OTHER),
        (caused(RefreshError("Spark"), ValueError("Job aborted due to stage failure")), Kind.OTHER),
        (caused(RefreshError("Spark"), ValueError("java.io.IOException: No space left on device")), Kind.DISK),
        (caused(RefreshError("Spark"), ValueError("java.lang.OutOfMemoryError: Java heap space")), Kind.LIMIT),
        (caused(RefreshError("Spark"), ValueError("  psycopg.errors.AdminShutdown: terminating")), Kind.CONNECTION),
        (caused(RefreshError("Spark"), ValueError("psycopg.errors.ConfigurationLimitExceeded: temp")), Kind.LIMIT),
        (
            caused(RefreshError("Spark"), ValueError("psycopg.OperationalError: the connection is lost")),
            Kind.CONNECTION,
        ),
        (AssertionError(), Kind.OTHER),
    ],
)
def test_kinds_of_errors(error: Exception, kind: Kind) -> None:
    assert kind_of(error) is kind


def test_waiting_callers_get_permanent_errors() -> None:
    waiting = {kind for kind in Kind if not answers_requests(kind)}
    assert waiting == {Kind.LOCK, Kind.SERIALIZATION, Kind.CONNECTION, Kind.SOURCE}


@pytest.mark.parametrize("kind", Kind)
def test_pauses_grow_up_to_a_limit_and_differ(kind: Kind) -> None:
    most = RETRIED.get(kind, 60.0)
    for count, longest in ((1, 2.0), (2, 4.0), (5, 32.0), (9, 512.0), (1000, most)):
        pauses = [pause_after(count, kind) for _ in range(50)]
        assert min(most, longest) / 2 <= min(pauses) < max(pauses) <= min(most, longest)

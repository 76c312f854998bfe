"""Classification of failed refreshes: the kind of a failure, whether it is retried automatically, and when.

SQLSTATEs are interpreted here only. The kind is stored with the failure; `_error_remedy()` in
sql/monitoring/history.sql has a remedy for each kind.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import psycopg

from pgtrickle.errors import (
    DatabaseFailedError,
    FuseBlownError,
    InvalidQueryError,
    KeyLostError,
    NotDifferentiableError,
    NotInTimeError,
    PgtrickleError,
    PrivilegeError,
    RefreshConflictError,
    RefreshesFailedError,
    SourceChangedError,
    SourceLockedError,
    UntrustedCatalogError,
)


class Kind(StrEnum):
    """The kind of a failure, as `diagnose_errors()` shows it."""

    LOCK = "lock"
    SERIALIZATION = "serialization"
    CONNECTION = "connection"
    SOURCE = "source"  # a source is being altered, or differs between databases
    DISK = "disk"
    MEMORY = "memory"
    LIMIT = "limit"  # the refresh needs more than a setting allows
    CANCELED = "canceled"
    PRIVILEGE = "privilege"
    DATA = "data"
    DEFINITION = "definition"
    FUNCTION = "function"  # a function or trigger of a user raised it
    FUSE = "fuse"
    OTHER = "other"


# Kinds that can go away without a change to the stream table, with the longest pause between two attempts in seconds.
# They are retried indefinitely. All other kinds count: after `max_consecutive_errors` the stream table is suspended.
RETRIED = {
    Kind.LOCK: 10.0,
    Kind.SERIALIZATION: 10.0,
    Kind.CONNECTION: 60.0,
    Kind.SOURCE: 60.0,
    Kind.DISK: 300.0,
    Kind.MEMORY: 300.0,
}
# Retried kinds that only an operator can end: a caller that waits for the refresh gets the error at once.
_NEED_HELP = (Kind.DISK, Kind.MEMORY)
_LONGEST_PAUSE = 60.0  # seconds, for kinds that count
LONGEST_MESSAGE = 4_000  # characters of a recorded error: an owner's code can raise messages of any length

# By class of SQLSTATE; _STATES has the exceptions. tests/unit/test_failures.py checks that no class is missing.
_CLASSES = {
    "02": Kind.OTHER,  # no data
    "03": Kind.OTHER,  # SQL statement not yet complete
    "08": Kind.CONNECTION,
    "09": Kind.FUNCTION,  # triggered action exception
    "0A": Kind.DEFINITION,  # feature not supported
    "0B": Kind.OTHER,  # invalid transaction initiation
    "0F": Kind.DATA,  # locator exception
    "0L": Kind.PRIVILEGE,  # invalid grantor
    "0P": Kind.PRIVILEGE,  # invalid role specification
    "0Z": Kind.FUNCTION,  # diagnostics exception
    "10": Kind.DATA,  # XQuery error
    "20": Kind.FUNCTION,  # case not found
    "21": Kind.DATA,  # cardinality violation
    "22": Kind.DATA,
    "23": Kind.DATA,  # integrity constraint violation
    "24": Kind.OTHER,  # invalid cursor state
    "25": Kind.OTHER,  # invalid transaction state
    "26": Kind.OTHER,  # invalid SQL statement name
    "27": Kind.DATA,  # triggered data change violation
    "28": Kind.PRIVILEGE,  # invalid authorization
    "2B": Kind.DEFINITION,  # dependent objects still exist
    "2D": Kind.FUNCTION,  # invalid transaction termination
    "2F": Kind.FUNCTION,  # SQL routine exception
    "34": Kind.OTHER,  # invalid cursor name
    "38": Kind.FUNCTION,  # external routine exception
    "39": Kind.FUNCTION,  # external routine invocation exception
    "3B": Kind.OTHER,  # savepoint exception
    "3D": Kind.DEFINITION,  # invalid catalog name
    "3F": Kind.DEFINITION,  # invalid schema name
    "40": Kind.SERIALIZATION,  # transaction rollback
    "42": Kind.DEFINITION,  # syntax error or access rule violation
    "44": Kind.DATA,  # WITH CHECK OPTION violation
    "53": Kind.LIMIT,  # insufficient resources
    "54": Kind.LIMIT,  # program limit exceeded
    "55": Kind.DEFINITION,  # object not in prerequisite state
    "57": Kind.CONNECTION,  # operator intervention
    "58": Kind.OTHER,  # system error
    "72": Kind.SERIALIZATION,  # snapshot too old
    "F0": Kind.OTHER,  # configuration file error
    "HV": Kind.DEFINITION,  # foreign data wrapper error
    "P0": Kind.FUNCTION,  # PL/pgSQL error
    "XX": Kind.OTHER,  # internal error
}
_STATES = {
    "25006": Kind.CONNECTION,  # read-only: the server is a standby now
    "25P03": Kind.CONNECTION,  # idle in transaction for too long: this process hung
    "25P04": Kind.CANCELED,  # transaction_timeout
    "40002": Kind.DATA,  # violation of a deferred constraint
    "40P01": Kind.LOCK,  # deadlock
    "42501": Kind.PRIVILEGE,
    "53000": Kind.MEMORY,
    "53100": Kind.DISK,
    "53200": Kind.MEMORY,
    "53300": Kind.CONNECTION,  # too many connections
    "55006": Kind.LOCK,  # object in use
    "55P03": Kind.LOCK,
    "57014": Kind.CANCELED,  # statement_timeout, or canceled by a user
    "58030": Kind.DISK,  # I/O error
    "HV001": Kind.MEMORY,
    "HV00N": Kind.CONNECTION,
}
# How a psycopg error appears in the text of a Spark error: the executors use psycopg too.
_PSYCOPG_ERROR = re.compile(r"\bpsycopg\.(?:errors\.)?([A-Z]\w+)")


@dataclass(frozen=True)
class Policy:
    """How failures are handled. A manual refresh shows them to the user; a service must not repeat them forever."""

    most_errors: int | None = None  # suspend the stream table after so many consecutive failures that count
    backoff: bool = True  # whether refreshes that take longer than their schedule stretch it
    # A process that hangs in an apply would block the stream table for the process that takes over.
    idle_in_apply: str = "0"


def kind_of_state(sqlstate: str) -> Kind:
    """The kind of a PostgreSQL error, by its SQLSTATE."""
    return _STATES.get(sqlstate) or _CLASSES.get(sqlstate[:2], Kind.OTHER)


def kind_of(error: BaseException) -> Kind:
    """The kind of an error that ended a refresh."""
    match error:
        case psycopg.Error(sqlstate=str() as state):
            return kind_of_state(state)
        case psycopg.OperationalError() | DatabaseFailedError():
            return Kind.CONNECTION
        case SourceLockedError():
            return Kind.LOCK
        case RefreshConflictError():
            return Kind.SERIALIZATION
        case SourceChangedError():
            return Kind.SOURCE
        case PrivilegeError() | UntrustedCatalogError():
            return Kind.PRIVILEGE
        case NotDifferentiableError() | InvalidQueryError() | KeyLostError():
            return Kind.DEFINITION
        case FuseBlownError():
            return Kind.FUSE
        case PgtrickleError() if error.__cause__ is not None:
            return _kind_in_text(f"{error.message}\n{error.__cause__}")
    return Kind.OTHER


def _kind_in_text(text: str) -> Kind:
    """The kind of a Spark error, of which only the text is known."""
    for name in _PSYCOPG_ERROR.findall(text):
        known = getattr(psycopg.errors, name, None)
        if isinstance(known, type) and issubclass(known, psycopg.Error):
            return kind_of(known())
    if "No space left on device" in text:
        return Kind.DISK
    return Kind.LIMIT if "OutOfMemoryError" in text else Kind.OTHER


def is_retried(kind: Kind) -> bool:
    """Whether the refresh may succeed later without a change to the stream table."""
    return kind in RETRIED


def answers_requests(kind: Kind) -> bool:
    """Whether requests that wait for the refresh fail with this error, instead of waiting for the next attempt."""
    return kind not in RETRIED or kind in _NEED_HELP


def pause_after(errors: int, kind: Kind) -> float:
    """Seconds until the next attempt: longer after each consecutive error, and randomized to spread many retries."""
    return min(RETRIED.get(kind, _LONGEST_PAUSE), 2.0 ** min(errors, 10)) * random.uniform(0.5, 1.0)


def failure_of(failures: Mapping[str, Exception], asked: int) -> Exception:
    """One error for a call that was to refresh `asked` stream tables, of which those in `failures` failed, by name.

    A call for a single stream table gets that stream table's own error.
    """
    name, first = next(iter(failures.items()))
    if asked == 1:
        if isinstance(first, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected):
            return locked(name, first)
        return first
    told = "; ".join(f"{name}: {_summary(error)}" for name, error in failures.items())
    message = f"{len(failures)} of {asked} stream tables could not be refreshed: {told}"
    for kind in (RefreshConflictError, NotInTimeError):  # callers tell these apart: a later attempt may succeed
        if isinstance(first, kind) and all(isinstance(error, kind) for error in failures.values()):
            return kind(message, first.hint)
    if len(failures) == 1 and isinstance(first, PgtrickleError):
        return first if name in first.message else type(first)(f"{name}: {first.message}", first.hint)
    hint = "The others are refreshed. `pgtrickle status` and `pgtrickle history NAME` tell more."
    return RefreshesFailedError(message, hint, dict(failures))


def locked(name: str, error: psycopg.Error) -> SourceLockedError:
    """The error for a command on a stream table that needs a lock which another transaction holds."""
    message = error.diag.message_primary or str(error)
    if name.rpartition(".")[2] not in message:
        message = f"{name}: a table that it needs is locked by another transaction ({message})"
    return SourceLockedError(message, error.diag.message_hint or "Try again when that transaction has ended.")


def _summary(error: Exception) -> str:
    if isinstance(error, PgtrickleError):
        return error.message
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        return error.diag.message_primary
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""What a failed refresh means: what kind of failure it is, whether it is tried again by itself, and after which pause.

This is the only place that knows SQLSTATEs. The kind of a failure is stored with it; `_error_remedy()` in 64_history.sql says
what helps.
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
    """What sort of failure it was, as `diagnose_errors()` shows it."""

    LOCK = "lock"
    SERIALIZATION = "serialization"
    CONNECTION = "connection"
    SOURCE = "source"  # it is being altered, or differs between databases
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


# Kinds that pass without a change to the stream table, with the longest pause between two attempts in seconds. They are
# tried again for ever. All others count: after `max_consecutive_errors` the stream table is suspended.
RETRIED = {
    Kind.LOCK: 10.0,
    Kind.SERIALIZATION: 10.0,
    Kind.CONNECTION: 60.0,
    Kind.SOURCE: 60.0,
    Kind.DISK: 300.0,
    Kind.MEMORY: 300.0,
}
# Retried kinds that need an operator to end: a caller waiting for the refresh gets the error at once.
_NEED_HELP = (Kind.DISK, Kind.MEMORY)
_LONGEST_PAUSE = 60.0  # while failures count
LONGEST_MESSAGE = 4_000  # of an error that is recorded: an owner's code can raise one of any length

# By class of SQLSTATE; _STATES has the exceptions. tests/unit/test_failures.py looks that no class is missing.
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
    "25P03": Kind.CONNECTION,  # idle in transaction for too long: this process stood still
    "25P04": Kind.CANCELED,  # transaction_timeout
    "40002": Kind.DATA,  # a constraint that is checked at the end
    "40P01": Kind.LOCK,  # deadlock
    "42501": Kind.PRIVILEGE,
    "53000": Kind.MEMORY,
    "53100": Kind.DISK,
    "53200": Kind.MEMORY,
    "53300": Kind.CONNECTION,  # too many connections
    "55006": Kind.LOCK,  # object in use
    "55P03": Kind.LOCK,
    "57014": Kind.CANCELED,  # statement_timeout, or by somebody
    "58030": Kind.DISK,  # I/O error
    "HV001": Kind.MEMORY,
    "HV00N": Kind.CONNECTION,
}
# How an error of psycopg shows in one of Spark's, whose executors use it too.
_PSYCOPG_ERROR = re.compile(r"\bpsycopg\.(?:errors\.)?([A-Z]\w+)")


@dataclass(frozen=True)
class Policy:
    """How failures are treated. A person who refreshes sees them; a service must not repeat them for ever."""

    most_errors: int | None = None  # after so many in a row that count the stream table is suspended
    backoff: bool = True  # whether refreshes that take longer than their schedule stretch it
    # A process that stands still in an apply would keep the stream table from those who take over.
    idle_in_apply: str = "0"


def kind_of_state(sqlstate: str) -> Kind:
    """The kind of an error of PostgreSQL's."""
    return _STATES.get(sqlstate) or _CLASSES.get(sqlstate[:2], Kind.OTHER)


def kind_of(error: BaseException) -> Kind:
    """The kind of any error that ended a refresh."""
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
    """The kind of an error of Spark's, which has but a text."""
    for name in _PSYCOPG_ERROR.findall(text):
        known = getattr(psycopg.errors, name, None)
        if isinstance(known, type) and issubclass(known, psycopg.Error):
            return kind_of(known())
    if "No space left on device" in text:
        return Kind.DISK
    return Kind.LIMIT if "OutOfMemoryError" in text else Kind.OTHER


def is_retried(kind: Kind) -> bool:
    """Whether the same refresh may succeed later without a change to the stream table."""
    return kind in RETRIED


def answers_requests(kind: Kind) -> bool:
    """Whether those who wait for the refresh are told that it failed, instead of waiting on."""
    return kind not in RETRIED or kind in _NEED_HELP


def pause_after(errors: int, kind: Kind) -> float:
    """Seconds until the next attempt: longer after each error in a row, and never the same for many at once."""
    return min(RETRIED.get(kind, _LONGEST_PAUSE), 2.0 ** min(errors, 10)) * random.uniform(0.5, 1.0)


def failure_of(failures: Mapping[str, Exception], asked: int) -> Exception:
    """The one error that tells what became of `asked` stream tables, given what went wrong by name.

    Who asked for one gets its error as it is.
    """
    name, first = next(iter(failures.items()))
    if asked == 1:
        if isinstance(first, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected):
            return locked(name, first)
        return first
    told = "; ".join(f"{name}: {_summary(error)}" for name, error in failures.items())
    message = f"{len(failures)} of {asked} stream tables could not be refreshed: {told}"
    for kind in (RefreshConflictError, NotInTimeError):  # what callers tell apart: later it may succeed
        if isinstance(first, kind) and all(isinstance(error, kind) for error in failures.values()):
            return kind(message, first.hint)
    if len(failures) == 1 and isinstance(first, PgtrickleError):
        return first if name in first.message else type(first)(f"{name}: {first.message}", first.hint)
    hint = "The others are refreshed. `pgtrickle status` and `pgtrickle history NAME` tell more."
    return RefreshesFailedError(message, hint, dict(failures))


def locked(name: str, error: psycopg.Error) -> SourceLockedError:
    """The error where a transaction of somebody else holds what a command on a stream table needs."""
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

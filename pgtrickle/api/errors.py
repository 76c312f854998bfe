"""Translation of PostgreSQL's errors into the classes of `pgtrickle.errors`, with their hints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import psycopg

from pgtrickle.errors import InvalidQueryError, PrivilegeError, StreamTableExistsError, StreamTableNotFoundError
from pgtrickle.refresh.failures import locked


@contextmanager
def plain_errors() -> Iterator[None]:
    """Translate PostgreSQL's errors about objects other than stream tables, and keep their hints."""
    try:
        yield
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        ours = PrivilegeError if isinstance(error, psycopg.errors.InsufficientPrivilege) else InvalidQueryError
        raise ours(error.diag.message_primary or str(error), error.diag.message_hint) from error


class clear_errors:
    """Translate PostgreSQL's errors about the named stream table, and keep their hints."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected):
            raise locked(self.name, error) from error
        if not isinstance(error, psycopg.Error) or isinstance(error, psycopg.OperationalError):
            return
        message, hint = error.diag.message_primary or str(error), error.diag.message_hint
        if isinstance(error, psycopg.errors.FeatureNotSupported) and message.startswith("cross-database references"):
            name = message.partition('"')[2].partition(".")[0]
            hint = f"Register the other database: pgtrickle database add {name} DSN"
        classes: dict[type[psycopg.Error], type[Any]] = {
            psycopg.errors.DuplicateTable: StreamTableExistsError,
            psycopg.errors.InsufficientPrivilege: PrivilegeError,
            psycopg.errors.UndefinedObject: StreamTableNotFoundError,
        }
        for known, ours in classes.items():
            if isinstance(error, known):
                raise ours(message, hint) from error
        raise InvalidQueryError(f"{self.name}: {message}", hint) from error

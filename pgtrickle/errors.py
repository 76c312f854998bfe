"""The exceptions that pgtrickle raises. The message names the object and the reason, the hint says what to do."""

from __future__ import annotations


class PgtrickleError(Exception):
    """The base class of all errors that pgtrickle raises deliberately."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        # Exception gets both arguments, so that an error from another process can be unpickled.
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nHINT: {self.hint}"


class InstallError(PgtrickleError):
    """The catalog could not be installed, upgraded or removed. The database is unchanged."""


class NotInstalledError(PgtrickleError):
    """The database has no pgtrickle catalog, or its version does not work with this release."""


class UntrustedCatalogError(PgtrickleError):
    """The catalog belongs to a role whose code must not run with the rights of the connected role."""


class UnsupportedServerError(PgtrickleError):
    """The server is an older version of PostgreSQL than pgtrickle supports."""


class ExtensionPresentError(PgtrickleError):
    """The pg_trickle extension is installed in this database and owns the names that pgtrickle needs."""


class InvalidQueryError(PgtrickleError):
    """PostgreSQL refuses the query, or its result cannot be a stream table."""


class NotDifferentiableError(PgtrickleError):
    """A differential refresh was requested, but a part of the query can only be refreshed in full.

    `reason` says why, and `fragment` is that part of the query.
    """

    def __init__(
        self, message: str, hint: str | None = None, *, reason: str | None = None, fragment: str | None = None
    ) -> None:
        super().__init__(message, hint)
        self.reason = message if reason is None else reason
        self.fragment = fragment


class StreamTableExistsError(PgtrickleError):
    """A stream table or another relation already has that name."""


class StreamTableNotFoundError(PgtrickleError):
    """There is no stream table with that name."""


class PrivilegeError(PgtrickleError):
    """A role lacks a right that the operation needs."""


class ConnectionFailedError(PgtrickleError):
    """The database could not be reached, or refused the login."""


class RefreshError(PgtrickleError):
    """A refresh failed. The stream table still has the contents of the last successful refresh."""


class NotInTimeError(RefreshError):
    """A service did not complete a request in time. The request is still pending."""


class RefreshConflictError(RefreshError):
    """Another process is refreshing the stream table, or took it over during this refresh."""


class RefreshesFailedError(RefreshError):
    """Some of several stream tables could not be refreshed. All others were.

    `failures` maps the name of each stream table that failed to its error.
    """

    def __init__(self, message: str, hint: str | None = None, failures: dict[str, Exception] | None = None) -> None:
        super().__init__(message, hint)
        self.failures = failures or {}


class SourceChangedError(RefreshError):
    """A source was altered, replaced or dropped in a way that prevents the refresh, or it keeps being altered."""


class KeyLostError(RefreshError):
    """The key of a source was dropped, so the key columns of the stream table no longer identify its rows."""


class SourceLockedError(RefreshError):
    """Another session holds a lock on a table that the stream table reads."""


class DatabaseFailedError(RefreshError):
    """A remote database that the stream table reads cannot be reached or read."""


class FuseBlownError(RefreshError):
    """More changes arrived at once than the fuse of the stream table allows."""


class JavaMissingError(PgtrickleError):
    """Spark needs a Java runtime, but there is none, or it is too old."""


class EmbeddedServerError(PgtrickleError):
    """The embedded PostgreSQL server of the demo and the tests could not be set up, started or stopped."""

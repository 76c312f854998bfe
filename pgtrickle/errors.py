"""Every error that a user can meet: each names the object and the reason, and its hint says what to do."""

from __future__ import annotations


class PgtrickleError(Exception):
    """The base of all errors raised on purpose by pgtrickle."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        # Both go to Exception too: an error then survives pickling on its way from another process.
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nHINT: {self.hint}"


class InstallError(PgtrickleError):
    """The catalog could not be installed, upgraded or removed; the database is as it was before."""


class NotInstalledError(PgtrickleError):
    """The database has no pgtrickle catalog, or one of a version this release cannot work with."""


class UntrustedCatalogError(PgtrickleError):
    """The database has a catalog of a role whose code must not run with the rights of the connected one."""


class UnsupportedServerError(PgtrickleError):
    """The server's version, or the kind of server, is not one that pgtrickle works with."""


class ExtensionPresentError(PgtrickleError):
    """The pg_trickle extension is installed in this database and owns the names that pgtrickle would use."""


class InvalidQueryError(PgtrickleError):
    """PostgreSQL refuses the defining query, or its result cannot be a table."""


class NotDifferentiableError(PgtrickleError):
    """The query was to be maintained differentially, but a part of it can only be refreshed in full.

    `reason` says why, `fragment` is that part of the query.
    """

    def __init__(
        self, message: str, hint: str | None = None, *, reason: str | None = None, fragment: str | None = None
    ) -> None:
        super().__init__(message, hint)
        self.reason = message if reason is None else reason
        self.fragment = fragment


class StreamTableExistsError(PgtrickleError):
    """A stream table, or another relation, already has that name."""


class StreamTableNotFoundError(PgtrickleError):
    """There is no stream table of that name."""


class PrivilegeError(PgtrickleError):
    """A role lacks a right that the operation needs."""


class ConnectionFailedError(PgtrickleError):
    """The database could not be reached, or refused the login."""


class RefreshError(PgtrickleError):
    """A refresh failed; the stream table still holds what the last successful one left."""


class NotInTimeError(RefreshError):
    """A service did not do in time what it was asked for; the request still stands."""


class RefreshConflictError(RefreshError):
    """Another process refreshes the stream table, or took it over while this one was at work."""


class RefreshesFailedError(RefreshError):
    """Of several stream tables some could not be refreshed; all others were.

    `failures` has the error of each by its name.
    """

    def __init__(self, message: str, hint: str | None = None, failures: dict[str, Exception] | None = None) -> None:
        super().__init__(message, hint)
        self.failures = failures or {}


class SourceChangedError(RefreshError):
    """A source was altered, replaced or dropped so that the stream table cannot be maintained as it stands."""


class KeyLostError(RefreshError):
    """The columns that tell the rows of a stream table apart no longer do so: the key of a source was dropped."""


class SourceLockedError(RefreshError):
    """Another session keeps a table locked that the stream table reads."""


class DatabaseFailedError(RefreshError):
    """Another database that the stream table reads cannot be reached, or not be read."""


class FuseBlownError(RefreshError):
    """More changes came at once than the stream table's fuse lets pass."""


class JavaMissingError(PgtrickleError):
    """Spark needs a Java runtime, and there is none or it is too old."""


class EmbeddedServerError(PgtrickleError):
    """The embedded PostgreSQL of the demo and the tests could not be set up, started or stopped."""

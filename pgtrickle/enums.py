"""Names that the catalog stores and users type."""

from __future__ import annotations

from enum import StrEnum


class RefreshMode(StrEnum):
    """How a stream table is to be refreshed."""

    AUTO = "AUTO"
    DIFFERENTIAL = "DIFFERENTIAL"
    FULL = "FULL"


class Action(StrEnum):
    """What a refresh does."""

    NO_DATA = "NO_DATA"
    DIFFERENTIAL = "DIFFERENTIAL"
    FULL = "FULL"
    REINITIALIZE = "REINITIALIZE"


class Status(StrEnum):
    """The status of a stream table."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    ERROR = "ERROR"
    SUSPENDED = "SUSPENDED"


class Storage(StrEnum):
    """Where a Citus cluster stores the rows of a stream table: `st_placement`."""

    AUTO = "auto"  # decided when it is filled for the first time
    LOCAL = "local"
    REFERENCE = "reference"
    DISTRIBUTED = "distributed"

"""The sources of a stream table: as the home database has them, and as they are at a cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignSource:
    """A table of a remote database that a stream table reads, as the home database has it."""

    pgt_id: int
    database: str
    relid: int  # OID of its stand-in in the home database
    there: int  # OID in its own database
    node: str  # of the database that it is in
    schema: str
    name: str
    shape: str
    shard: bool  # it is the table of a set member
    resolved: bool  # its stand-in is a foreign table of postgres_fdw
    redirected: bool  # that foreign table points to another table by now
    consumer: str
    label: str
    columns: list[int]


@dataclass(frozen=True)
class Source:
    """A source at the cut, with what happened to it since the frontier of one stream table."""

    relid: int
    label: str
    buffer: str | None
    stable_name: str | None
    signature: str | None
    known_signature: str | None
    buffered: int  # bytes of its change buffer
    changed: bool = False
    markers: tuple[str, ...] = ()
    database: str = ""  # its database, if that is a remote one or a Citus node
    there: int = 0  # its OID in that database
    proofs: tuple[str | None, ...] = ()  # that earlier refreshes committed there
    shard: bool = False  # the table of a set member
    resting: bool = False  # a set member's table that was not cut: the member has no news, or cannot be reached
    joined: bool = False  # the table of a new set member: all its rows are changes
    spread: bool = False  # the part of a distributed table on one node, or on the coordinator
    moved_in: bool = False  # shards on a new node: their rows were read on another node, or changed without capture

    @property
    def lacking(self) -> bool:
        """Whether capture triggers are missing, so that changes after this cut may not be captured."""
        return self.signature == "lacking"

    @property
    def rewritten(self) -> bool:
        """Whether an ALTER TABLE may have changed its values, which no trigger captures."""
        return self.signature == "rewritten"

    @property
    def attached(self) -> bool:
        """Whether its changes are already captured for this stream table."""
        return self.buffer is not None or self.resting

    @property
    def captured(self) -> bool:
        """Whether its changes are captured, or will be."""
        return self.attached or bool(self.database)

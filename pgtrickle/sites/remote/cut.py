"""Cuts of remote databases: one consistent snapshot of each, with what it stores for the stream tables that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from pgtrickle.catalog.databases import is_node
from pgtrickle.errors import DatabaseFailedError, SourceLockedError
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.postgres.connection import is_pooled
from pgtrickle.postgres.transactions import HURRIED_LOCK_TIMEOUT, SHARED_LOCK_TIMEOUT, limit_cut
from pgtrickle.sites.citus.shards import Shards, shards_here
from pgtrickle.sites.shared_cut import SharedCut
from pgtrickle.sites.source import ForeignSource


@dataclass(frozen=True)
class Consumed:
    """A source as its own database has it at the cut, for one consumer."""

    consumer: str
    relid: int
    stable_name: str
    buffer: str
    buffered: int
    signature: str
    shape: str
    proof: str | None
    former_proof: str | None


@dataclass(frozen=True)
class RemoteCut:
    """One consistent snapshot of a remote database."""

    database: str
    conn: psycopg.Connection[Any]
    node: str
    snapshot: Snapshot
    consumed: Mapping[tuple[str, int], Consumed]  # by consumer and table
    incarnation: str  # of its server; changes with every restart and crash
    shards: Mapping[int, Shards] = field(default_factory=dict)  # of a node, by table
    looks: Mapping[str, str] = field(
        default_factory=dict
    )  # of a set member: its state as of _poll_consumers(), by consumer
    shared_cut: SharedCut | None = None  # the broker's cut whose snapshot this is
    proof: str = field(default_factory=lambda: str(uuid4()))


def take_brokered_cut(
    conn: psycopg.Connection[Any],
    database: str,
    sources: Sequence[ForeignSource],
    shared_cut: SharedCut,
    proofs: Mapping[str, str],
) -> RemoteCut | None:
    """A cut in the broker's snapshot; None if that has ended, or is older than what a consumer has stored.

    The broker locked the tables that are read before it took its snapshot, and still holds both when this cut gets its
    own locks. The proof that a consumer committed after its last cut must be visible, which shows that the snapshot is
    newer.
    """
    if is_pooled(conn) or not {source.there for source in sources} <= shared_cut.locked:
        return None
    conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    try:
        cut = replace(take_remote_cut(conn, database, sources, shared_cut.snapshot), shared_cut=shared_cut)
        if all(proofs[one.consumer] in (one.proof, one.former_proof) for one in cut.consumed.values()):
            return cut
        conn.execute("ROLLBACK")
        return None
    except (
        psycopg.errors.UndefinedObject,
        psycopg.errors.InvalidParameterValue,
        psycopg.errors.ObjectNotInPrerequisiteState,
        SourceLockedError,
    ):
        conn.execute("ROLLBACK")
        return None


def take_remote_cut(
    conn: psycopg.Connection[Any],
    database: str,
    sources: Sequence[ForeignSource],
    snapshot: str | None = None,
    locked: Sequence[str] = (),
) -> RemoteCut:
    """Lock the tables that are read, or on a node their shards, then take a snapshot or import the given one."""
    timeout = HURRIED_LOCK_TIMEOUT if is_node(database) else SHARED_LOCK_TIMEOUT
    limit_cut(conn, timeout)
    names = [sql.Identifier(*name) for name in sorted({(source.schema, source.name) for source in sources})]
    placed = {source.there for source in sources} if is_node(database) else set()
    tables = [sql.SQL(name) for name in locked] if placed else names
    try:
        with conn.transaction():
            if tables:
                conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.SQL(", ").join(tables)))
    except psycopg.errors.LockNotAvailable as error:
        raise SourceLockedError(
            f"a table of database {database} is locked by another session: {error.diag.message_primary}",
            "A service tries again by itself.",
        ) from error
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        pass  # renamed or dropped, which shows when shapes are compared
    if snapshot is not None:
        conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
    row = conn.execute(
        "SELECT pgtrickle._database_identity(), pg_current_snapshot()::text, pg_is_in_recovery(), pgtrickle._incarnation()"
    ).fetchone()
    assert row is not None
    if row[2]:
        raise DatabaseFailedError(
            f"database {database} is on a standby",
            "Register its primary: changes are captured there, and snapshots true.",
        )
    with conn.cursor(row_factory=class_row(Consumed)) as cursor:
        consumers = sorted({source.consumer for source in sources})
        found = cursor.execute(
            "SELECT consumer, relid, stable_name, buffer, buffered, signature, shape, proof::text, former_proof::text"
            " FROM pgtrickle._consumer_sources(%s)",
            (consumers,),
        ).fetchall()
    consumed = {(one.consumer, one.relid): one for one in found}
    members = sorted({source.consumer for source in sources if source.shard})
    looks = (
        conn.execute("SELECT consumer, state FROM pgtrickle._poll_consumers(%s)", (members,)).fetchall()
        if members
        else []
    )
    shards = shards_here(conn, placed)
    if sorted(name for one in shards.values() for name in one.names) != sorted(locked):
        raise SourceLockedError(
            f"shards came to {database} or left it at this moment", "A service tries again by itself."
        )
    return RemoteCut(database, conn, row[0], Snapshot.parse(row[1]), consumed, row[3], shards, dict(looks))


def shards_on(conn: psycopg.Connection[Any], sources: Sequence[ForeignSource]) -> list[str]:
    """The names of the shards of these tables that a node has now."""
    shards = shards_here(conn, {source.there for source in sources})
    return [name for one in shards.values() for name in one.names]


def end_cut(conn: psycopg.Connection[Any]) -> None:
    """End a cut. If the connection is lost, the cut has ended with it."""
    try:
        conn.execute("ROLLBACK")
    except psycopg.Error:
        conn.close()

"""Snapshots of a PostgreSQL server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """A PostgreSQL snapshot: transactions below xmax are over, except those in progress."""

    xmin: int
    xmax: int
    in_progress: tuple[int, ...] = ()
    passed: int | None = None  # a later transaction that was seen nevertheless: the one that stored it

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """From `xmin:xmax:xip,xip`, as pg_snapshot prints."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid: int) -> bool:
        """Whether a transaction that is over now was over then."""
        return xid < self.xmax and xid not in self.in_progress

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.in_progress))}"

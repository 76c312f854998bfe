"""Snapshots of a PostgreSQL server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """A PostgreSQL snapshot: transactions below xmax have ended, except those in progress."""

    xmin: int
    xmax: int
    in_progress: tuple[int, ...] = ()
    passed: int | None = None  # a later transaction that counts as seen: the one that stored the snapshot

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Parse `xmin:xmax:xip,xip`, the output format of pg_snapshot."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid: int) -> bool:
        """Whether a transaction that has ended by now had ended when the snapshot was taken."""
        return xid < self.xmax and xid not in self.in_progress

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.in_progress))}"

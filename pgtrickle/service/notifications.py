"""Wait for a connection's notifications; other threads can end the wait."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from typing import Any, Self

import psycopg


class Waker:
    """Sleeps until the server sends a notification or another thread of this process calls `wake()`."""

    def __init__(self) -> None:
        self._mine, self._theirs = socket.socketpair()
        for end in (self._mine, self._theirs):
            end.setblocking(False)

    def wake(self) -> None:
        """End the current sleep; if there is none, the next one ends at once."""
        with suppress(OSError):  # buffer full: already woken; closed: no sleep will follow
            self._theirs.send(b".")

    def sleep(self, conn: psycopg.Connection[Any] | None, seconds: float) -> bool:
        """Sleep; True if woken before the time was over."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._mine, selectors.EVENT_READ)
            if conn is not None:
                selector.register(conn, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                ready = [key.fileobj for key, _ in selector.select(left)]
                if self._mine in ready:
                    with suppress(BlockingIOError):
                        while self._mine.recv(4096):
                            pass
                    return True
                # Other unsolicited messages do not count: a notice is ignored, and the end of the connection raises an
                # error. Take all notifications that have arrived: psycopg would keep those that are not fetched.
                if conn is not None and conn in ready and list(conn.notifies(timeout=0)):
                    return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mine.close()
        self._theirs.close()

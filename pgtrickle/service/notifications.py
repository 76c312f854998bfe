"""Waiting for a connection's notifications in a way that other threads can end."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from typing import Any, Self

import psycopg


class Waker:
    """Sleeps until the server notifies, or another thread of this process says that there is something to do."""

    def __init__(self) -> None:
        self._mine, self._theirs = socket.socketpair()
        for end in (self._mine, self._theirs):
            end.setblocking(False)

    def wake(self) -> None:
        """End the present sleep, or the next one at once."""
        with suppress(OSError):  # full: it was woken already; closed: nobody sleeps any more
            self._theirs.send(b".")

    def sleep(self, conn: psycopg.Connection[Any] | None, seconds: float) -> bool:
        """Whether somebody woke us before the time was over."""
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
                # Anything else that a server sends by itself, a notice or its farewell, wakes nobody: the latter is an error.
                # All that came are taken: psycopg would keep those that nobody asks for.
                if conn is not None and conn in ready and list(conn.notifies(timeout=0)):
                    return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mine.close()
        self._theirs.close()

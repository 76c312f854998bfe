"""Clients that open connections and send little or nothing cannot exhaust the service's threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.request import urlopen

import pytest

from pgtrickle.observability.metrics_server import Limits, serve_http
from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.service import Service
from tests.support.service import until

NEVER = 3600.0


@pytest.fixture
def service() -> Iterator[Service]:
    """Not started: the HTTP server only reads its state."""
    made = Service(ServiceConfig((ServerConfig("none", "host=/nonexistent"),)))
    yield made
    made.pool.stop(5.0)


@contextmanager
def serving(service: Service, limits: Limits) -> Iterator[int]:
    """The port of a server with these limits."""
    server = serve_http(service, "127.0.0.1:0", limits)
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def dial() -> Iterator[Callable[[int], socket.socket]]:
    """Opens connections to a port of this machine, and closes them after the test."""
    with ExitStack() as stack:

        def connect(port: int) -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))

        yield connect


def handlers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
            return bool(answer.read() == b"ok\n")
    except OSError:
        return False


def has_ended(client: socket.socket) -> bool:
    """Whether the server has closed a connection; waits until it sends anything."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_the_oldest_connection_makes_room_for_a_new_one(service: Service, dial: Callable[[int], socket.socket]) -> None:
    with serving(service, Limits(connections=16, silence=NEVER, seconds=NEVER)) as port:
        held = [dial(port) for _ in range(100)]
        assert all(has_ended(client) for client in held[:84])
        until(lambda: handlers() == 16, "no more threads than there may be")
        for client in held[84:]:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert b"200 OK" in client.recv(1000)


def test_slow_clients_do_not_block_others(service: Service, dial: Callable[[int], socket.socket]) -> None:
    with serving(service, Limits(connections=16, silence=NEVER, seconds=NEVER)) as port:
        for _ in range(40):
            dial(port)
        for _ in range(30):
            dial(port).sendall(b"GET /healthz HTTP/1.0\r\nX-Slow: ")
            assert is_healthy(port)


def test_connections_of_silent_clients_are_closed(service: Service, dial: Callable[[int], socket.socket]) -> None:
    with serving(service, Limits(connections=4, silence=0.5, seconds=NEVER)) as port:
        held = [dial(port) for _ in range(4)]
        held[0].sendall(b"GET /healthz HTTP/1.0\r\nX-Half: ")
        assert all(has_ended(client) for client in held)
        until(lambda: is_healthy(port), "an answer")


def test_a_client_that_sends_a_byte_at_a_time_is_disconnected(
    service: Service, dial: Callable[[int], socket.socket]
) -> None:
    """Each byte resets the idle time, so only the limit of the whole connection helps."""
    with serving(service, Limits(connections=1, silence=NEVER, seconds=1.0)) as port:
        slow = dial(port)
        slow.sendall(b"GET /healthz HTTP/1.0\r\nX-Slow: ")
        slow.settimeout(0.05)

        def drip() -> bool:
            try:
                slow.sendall(b"x")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        until(drip, "the end of the slow connection")
        until(lambda: is_healthy(port), "an answer")


def test_the_command_serves_with_limits(service: Service, dial: Callable[[int], socket.socket]) -> None:
    """As `pgtrickle run` does, without setting limits."""
    server = serve_http(service, "127.0.0.1:0")
    try:
        port = server.server_address[1]
        held = [dial(port) for _ in range(50)]
        assert has_ended(held[0])
        until(lambda: handlers() <= 16, "no more threads than there may be")
        until(lambda: is_healthy(port), "an answer")
    finally:
        server.shutdown()
        server.server_close()

"""The HTTP endpoints of a service: /metrics for Prometheus, /healthz and /readyz for process supervisors."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from pgtrickle.errors import PgtrickleError
from pgtrickle.service.service import Service

log = logging.getLogger("pgtrickle.http")


@dataclass(frozen=True)
class Limits:
    """The number of concurrent clients, and time limits for each."""

    connections: int = 16
    silence: float = 5.0  # seconds for which a client may neither send nor receive anything
    seconds: float = 10.0  # for a connection as a whole, even if it is active


LIMITS = Limits()


class LimitedServer(ThreadingHTTPServer):
    """Serves a limited number of connections, each for a limited time, so that slow clients cannot use up its threads.

    If the limit is reached, a new connection replaces the oldest one: legitimate requests take milliseconds.
    """

    request_queue_size = 128  # large enough that clients do not have to retry after a second

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], limits: Limits) -> None:
        self._limits = limits
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._deadlines) >= self._limits.connections:
                oldest = next(iter(self._deadlines))
                del self._deadlines[oldest]
                _end(oldest)
            self._deadlines[request] = time.monotonic() + self._limits.seconds
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Shut down connections that have exceeded the time limit; their threads then see the end of the stream."""
        with self._lock:  # a socket that is still registered is not closed yet
            for request, deadline in self._deadlines.items():
                if deadline < time.monotonic():
                    _end(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Do not log clients that disconnect in the middle of a response.
        if not isinstance(sys.exception(), OSError):
            log.exception("a request failed")


def _end(request: socket.socket) -> None:
    """Shut down a connection, so that the thread that serves it sees the end of the stream."""
    with suppress(OSError):  # the client is already gone
        request.shutdown(socket.SHUT_RDWR)


class _Metrics(Collector):
    """Collects the service's state at the time of the scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        pool = self._service.pool
        yield _gauge("workers", "Workers of this service", pool.size)
        yield _gauge("workers_active", "Workers that are refreshing", pool.active)
        yield _gauge("jobs_queued", "Units that wait for a worker", pool.queued)
        up = GaugeMetricFamily("pgtrickle_server_up", "1 if the server is watched, 0 if not", labels=["server"])
        served = GaugeMetricFamily(
            "pgtrickle_database_served", "1 if a scheduler runs, 0 if not", labels=["server", "database", "reason"]
        )
        counters = {
            name: CounterMetricFamily(f"pgtrickle_{name}", meaning, labels=["server", "database"])
            for name, meaning in _MEANING.items()
        }
        for launcher in self._service.launchers:
            up.add_metric([launcher.server.name], launcher.problem is None)
            for name, watched in list(launcher.databases.items()):
                labels = [launcher.server.name, name]
                served.add_metric([*labels, watched.problem or ""], watched.served)
                if watched.tended is not None:
                    for counter, family in counters.items():
                        family.add_metric(labels, getattr(watched.tended.counters, counter))
        yield up
        yield served
        yield from counters.values()


_MEANING = {
    "ticks": "Ticks of the scheduler",
    "tick_seconds": "Seconds spent in ticks",
    "refreshes": "Refreshes that were completed",
    "failures": "Refreshes that failed",
    "refresh_seconds": "Seconds workers spent on refreshes",
    "rows": "Rows inserted into and deleted from stream tables",
    "crashes": "Schedulers that ended with an error",
    "verifications": "Comparisons of a stream table with its query",
    "differences": "Comparisons that found a difference",
}


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pgtrickle_{name}", meaning, value)


def serve_http(service: Service, address: str, limits: Limits = LIMITS) -> ThreadingHTTPServer:
    """Serve HTTP at an address (host:port) in a separate thread. The caller shuts the server down."""
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(_Metrics(service))

    class Handler(BaseHTTPRequestHandler):
        timeout = limits.silence

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif self.path == "/healthz":
                self._answer(200, b"ok\n", "text/plain")
            elif self.path == "/readyz":
                problems, unserved = service.problems, service.unserved
                ready = not problems and not unserved
                body = {"ready": ready, "problems": problems, "unserved": unserved}
                self._answer(200 if ready else 503, json.dumps(body).encode(), "application/json")
            else:
                self._answer(404, b"there are /metrics, /healthz and /readyz\n", "text/plain")

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log requests."""

    try:
        server = LimitedServer((host, int(port)), Handler, limits)
    except (OSError, ValueError, OverflowError) as error:
        raise PgtrickleError(
            f"cannot listen on {address}: {error}", "Choose another address with --http, or none with --http ''."
        ) from error
    threading.Thread(target=server.serve_forever, name="pgtrickle-http", daemon=True).start()
    return server

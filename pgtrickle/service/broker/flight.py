"""Transfer of shared cuts to other processes over Arrow Flight: the cut as JSON, its rows as Arrow."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import flight

from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.service.config import BrokerConfig, is_loopback
from pgtrickle.sites.shared_cut import SharedChanges, SharedCut

if TYPE_CHECKING:
    from pgtrickle.service.broker.publisher import Publisher

log = logging.getLogger("pgtrickle.broker")

LATE = 1.0  # seconds that an answer may take beyond the time for which the broker waits for a cut
PLAIN, TLS = "grpc", "grpc+tls"


class FlightServer:
    """Serves shared cuts. The token in a database's catalog gives access only to what was read in that database.

    `publisher_of` returns the publisher for a token.
    """

    def __init__(self, config: BrokerConfig, publisher_of: Callable[[str], Publisher | None]) -> None:
        host, _, port = config.listen.rpartition(":")
        scheme, pairs = PLAIN, []
        if config.certificate is not None and config.key is not None:
            scheme, pairs = TLS, [(config.certificate.read_bytes(), config.key.read_bytes())]
        self._server = _Server(f"{scheme}://{host}:{port}", pairs, publisher_of)
        self.address = f"{scheme}://{host}:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve, name="pgtrickle-broker-offers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join(5.0)


class _Server(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(
        self,
        location: str,
        certificates: Sequence[tuple[bytes, bytes]],
        publisher_of: Callable[[str], Publisher | None],
    ) -> None:
        super().__init__(location, tls_certificates=list(certificates))
        self._publisher_of = publisher_of

    def do_action(self, context: Any, action: flight.Action) -> list[flight.Result]:
        publisher, asked = self._asked(action.body.to_pybytes())
        shared_cut = publisher.shared_cut(asked["consumers"], asked["seconds"])
        return [flight.Result(pa.py_buffer(json.dumps(_written(shared_cut)).encode()))]

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.RecordBatchStream:
        publisher, asked = self._asked(ticket.ticket)
        rows = publisher.rows(asked["number"], asked["source"])
        if rows is None:
            raise flight.FlightUnavailableError("that cut has ended")
        return flight.RecordBatchStream(rows)

    def _asked(self, body: bytes) -> tuple[Publisher, dict[str, Any]]:
        asked: dict[str, Any] = json.loads(body)
        publisher = self._publisher_of(str(asked.get("token", "")))
        if publisher is None or publisher.node != asked.get("node"):
            raise flight.FlightUnauthenticatedError("the token is not this broker's for that database")
        return publisher, asked


def request_shared_cut(
    address: str, token: str, node: str, consumers: Sequence[str], seconds: float, ca: Path | None = None
) -> SharedCut | None:
    """The shared cut of a broker in another process; None if there is none in time or the broker is not trusted.

    Without TLS, the token is sent to addresses of this machine only. With TLS, the broker's certificate must be signed
    by a CA in the CA file, or by one of the system's roots if there is no such file.
    """
    body = json.dumps({"token": token, "node": node, "consumers": list(consumers), "seconds": seconds})
    location = urlsplit(address)
    if location.scheme != TLS and not is_loopback(location.hostname or ""):
        log.warning("the broker at %s is not asked: its address is another machine's and not encrypted", address)
        return None
    try:
        roots = {"tls_root_certs": ca.read_bytes()} if ca is not None and location.scheme == TLS else {}
        with flight.connect(address, **roots) as client:
            options = flight.FlightCallOptions(timeout=seconds + LATE)
            (result,) = client.do_action(flight.Action("offer", body.encode()), options)
            found = json.loads(result.body.to_pybytes())
            # Fetch the rows now, so that the cut is complete even if the broker dies later.
            return _read(client, token, found, options) if found is not None else None
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        log.info("no offer from the broker at %s: %s", address, error)
        return None


def _read(
    client: flight.FlightClient, token: str, found: dict[str, Any], options: flight.FlightCallOptions
) -> SharedCut:
    sources = {}
    for name, one in found["sources"].items():
        ticket = {"token": token, "node": found["node"], "number": found["number"], "source": name}
        rows = client.do_get(flight.Ticket(json.dumps(ticket).encode()), options).read_all()
        sources[name] = SharedChanges(Snapshot.parse(one["base"]), one["columns"], rows)
    locked = frozenset(found["locked"])
    return SharedCut(found["number"], found["node"], found["snapshot"], locked, found["settings"], sources)


def _written(shared_cut: SharedCut | None) -> dict[str, Any] | None:
    if shared_cut is None:
        return None
    return {
        "number": shared_cut.number,
        "node": shared_cut.node,
        "snapshot": shared_cut.snapshot,
        "locked": sorted(shared_cut.locked),
        "settings": dict(shared_cut.settings),
        "sources": {
            name: {"base": str(one.base), "columns": dict(one.columns)} for name, one in shared_cut.sources.items()
        },
    }

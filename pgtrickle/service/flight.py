"""Offers of a broker to other processes, by Arrow Flight: the cut as JSON, its rows as Arrow."""

from __future__ import annotations

import hmac
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import flight

from pgtrickle.capture.frontier import Snapshot
from pgtrickle.engine.offers import Offer, Offered

if TYPE_CHECKING:
    from pgtrickle.service.desk import Desk

log = logging.getLogger("pgtrickle.broker")

LATE = 1.0  # seconds that an answer may take beyond the time to wait for it


class FlightOffers:
    """The server: who knows the token, which is kept in the catalog of the database that is read, gets what was read."""

    def __init__(self, listen: str, token: str, desk_of: Callable[[str], Desk | None]) -> None:
        host, _, port = listen.rpartition(":")
        self._server = _Server(f"grpc://{host}:{port}", token, desk_of)
        self.address = f"{host}:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve, name="pgtrickle-broker-offers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join(5.0)


class _Server(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, location: str, token: str, desk_of: Callable[[str], Desk | None]) -> None:
        super().__init__(location)
        self._token = token
        self._desk_of = desk_of

    def do_action(self, context: Any, action: flight.Action) -> list[flight.Result]:
        asked = self._asked(action.body.to_pybytes())
        desk = self._desk_of(asked["node"])
        offer = desk.offer(asked["consumers"], asked["seconds"]) if desk is not None else None
        return [flight.Result(pa.py_buffer(json.dumps(_written(offer)).encode()))]

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.RecordBatchStream:
        asked = self._asked(ticket.ticket)
        desk = self._desk_of(asked["node"])
        rows = desk.rows(asked["number"], asked["source"]) if desk is not None else None
        if rows is None:
            raise flight.FlightUnavailableError("that cut is over")
        return flight.RecordBatchStream(rows)

    def _asked(self, body: bytes) -> dict[str, Any]:
        asked: dict[str, Any] = json.loads(body)
        if not hmac.compare_digest(str(asked.pop("token", "")), self._token):
            raise flight.FlightUnauthenticatedError("the token is not this broker's")
        return asked


def ask_for_offer(address: str, token: str, node: str, consumers: Sequence[str], seconds: float) -> Offer | None:
    """The offer of a broker in another process; None where there is none in time."""
    body = json.dumps({"token": token, "node": node, "consumers": list(consumers), "seconds": seconds})
    try:
        with flight.connect(f"grpc://{address}") as client:
            options = flight.FlightCallOptions(timeout=seconds + LATE)
            (result,) = client.do_action(flight.Action("offer", body.encode()), options)
            found = json.loads(result.body.to_pybytes())
            # The rows come now: a broker that dies later leaves this cut as it is.
            return _read(client, token, found, options) if found is not None else None
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        log.info("no offer from the broker at %s: %s", address, error)
        return None


def _read(client: flight.FlightClient, token: str, found: dict[str, Any], options: flight.FlightCallOptions) -> Offer:
    sources = {}
    for name, one in found["sources"].items():
        ticket = {"token": token, "node": found["node"], "number": found["number"], "source": name}
        rows = client.do_get(flight.Ticket(json.dumps(ticket).encode()), options).read_all()
        sources[name] = Offered(Snapshot.parse(one["base"]), one["columns"], rows)
    locked = frozenset(found["locked"])
    return Offer(found["number"], found["node"], found["snapshot"], locked, found["settings"], sources)


def _written(offer: Offer | None) -> dict[str, Any] | None:
    if offer is None:
        return None
    return {
        "number": offer.number,
        "node": offer.node,
        "snapshot": offer.snapshot,
        "locked": sorted(offer.locked),
        "settings": dict(offer.settings),
        "sources": {name: {"base": str(one.base), "columns": dict(one.columns)} for name, one in offer.sources.items()},
    }

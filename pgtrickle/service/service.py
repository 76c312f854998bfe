"""A service process: a launcher per server, and one pool of workers for all of them."""

from __future__ import annotations

import logging
import sys
import uuid
from dataclasses import dataclass, field

from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.service.broker.broker import Broker
from pgtrickle.service.config import ServiceConfig
from pgtrickle.service.launcher import Launcher
from pgtrickle.service.pool import Pool
from pgtrickle.service.remote_watch import RemoteWatch
from pgtrickle.service.scheduling.rotation import Rotation
from pgtrickle.sites.remote.connections import Connections

log = logging.getLogger("pgtrickle.service")

SWITCH_SECONDS = 0.0005


@dataclass
class Service:
    """All components of a running service. Start it, wait for a signal, stop it."""

    config: ServiceConfig
    service_id: uuid.UUID = field(default_factory=uuid.uuid4)

    def __post_init__(self) -> None:
        self.pool = Pool(4)
        self.watch = RemoteWatch(Connections(frozenset(self.config.trusted_owners), self.config.dsn_policy))
        self.helpers = HelperProcesses()
        self.broker = Broker(self.service_id, self.watch.connections, self.config.lease_seconds, self.config.broker)
        self.rotation = Rotation()
        self.launchers = [
            Launcher(
                server,
                self.config,
                self.service_id,
                self.pool,
                self.watch,
                self.helpers,
                self.broker,
                self.rotation,
                self._fit_pool,
            )
            for server in self.config.servers
        ]

    def start(self) -> None:
        # With the default switch interval, every small statement would wait 5 ms for a thread that receives many rows.
        sys.setswitchinterval(SWITCH_SECONDS)
        for launcher in self.launchers:
            launcher.start()

    def stop(self) -> bool:
        """Start nothing new and finish running refreshes; False if some did not end in time."""
        for launcher in self.launchers:
            launcher.drain()
        finished = self.pool.stop(self.config.drain_seconds)
        if not finished:
            log.warning("refreshes still run after %s s: giving up on them", self.config.drain_seconds)
        for launcher in self.launchers:
            launcher.stop(5.0)
        self.watch.stop()
        self.broker.stop()
        self.watch.connections.end()
        self.helpers.close()
        return finished

    def _fit_pool(self) -> None:
        """Resize the pool to the largest number of workers that any database has configured."""
        size = max((settings.workers for launcher in self.launchers for settings in launcher.settings), default=0)
        if size not in (0, self.pool.size):
            self.pool.resize(size)

    @property
    def problems(self) -> dict[str, str]:
        """Servers that are not watched, with the reason."""
        return {
            launcher.server.name: launcher.problem or "it has not been polled yet"
            for launcher in self.launchers
            if launcher.problem is not None or launcher.rounds == 0
        }

    @property
    def unserved(self) -> dict[str, dict[str, str]]:
        """The databases of each server that should be served but are not, with the reason."""
        found = {launcher.server.name: launcher.unserved for launcher in self.launchers}
        return {server: databases for server, databases in found.items() if databases}

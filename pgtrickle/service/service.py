"""One service process: a launcher per server, one pool of workers, one address for metrics."""

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
    """Everything that runs; start it, wait for a signal, stop it."""

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
        # Who only wants to send a statement would wait 5 ms each time for a thread that takes many rows in.
        sys.setswitchinterval(SWITCH_SECONDS)
        for launcher in self.launchers:
            launcher.start()

    def stop(self) -> bool:
        """Finish what runs, start nothing more; False if something did not end within the deadline."""
        for launcher in self.launchers:
            launcher.drain()
        finished = self.pool.stop(self.config.drain_seconds)
        if not finished:
            log.warning("refreshes still run after %s s: they are given up", self.config.drain_seconds)
        for launcher in self.launchers:
            launcher.stop(5.0)
        self.watch.stop()
        self.broker.stop()
        self.watch.connections.end()
        self.helpers.close()
        return finished

    def _fit_pool(self) -> None:
        """As many workers as the database that wants the most of them."""
        size = max((settings.workers for launcher in self.launchers for settings in launcher.settings), default=0)
        if size not in (0, self.pool.size):
            self.pool.resize(size)

    @property
    def problems(self) -> dict[str, str]:
        """Servers that are not watched, with the reason."""
        return {
            launcher.server.name: launcher.problem or "it was not looked at yet"
            for launcher in self.launchers
            if launcher.problem is not None or launcher.rounds == 0
        }

    @property
    def unserved(self) -> dict[str, dict[str, str]]:
        """By server: databases that should be served and are not, with the reason."""
        found = {launcher.server.name: launcher.unserved for launcher in self.launchers}
        return {server: databases for server, databases in found.items() if databases}

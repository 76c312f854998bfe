"""The service in a separate process, which can be killed, frozen, and stopped at a step of a refresh."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.request import urlopen
from uuid import UUID

import psutil
import psycopg
from prometheus_client.parser import text_string_to_metric_families

from pgtrickle.service.config import ServerConfig
from tests.support.database import APP_ROLE
from tests.support.killable import REPOSITORY, is_dead
from tests.support.service import until

# The real command. With a step, the first refresh that reaches it reports so and waits for a line of input.
_PROGRAM = """
import sys
import threading
from functools import partial
from pgtrickle.cli.main import main
from pgtrickle.refresh.engine import Engine
from pgtrickle.service import worker
step = sys.argv.pop(1)
first = threading.Lock()
def stop(name):
    if name == step and first.acquire(blocking=False):
        print("reached", name, flush=True)
        sys.stdin.readline()
if step:
    worker.Engine = partial(Engine, on_step=stop)
main(sys.argv[1:])
"""


class ServiceProcess:
    """`pgtrickle run` as a child process in its own process group, which includes its JVM.

    Its files (configuration, log) are in `directory`. Its counters are read from /metrics.
    """

    def __init__(
        self,
        directory: Path,
        *servers: ServerConfig,
        step: str = "",
        lease_seconds: float = 3.0,
        log_level: str = "info",
    ) -> None:
        self.step = step
        self._address = f"127.0.0.1:{_free_port()}"
        seconds = {"lease_seconds": lease_seconds, "list_seconds": 0.5, "replica_seconds": 0.5}
        config = directory / f"{_number(directory)}.toml"
        service: dict[str, float | str | list[str]] = {**seconds, "http": self._address, "log_format": "json"}
        service |= {"trusted_owners": [APP_ROLE], "log_level": log_level}
        config.write_text(_toml(service, servers), encoding="utf-8")
        self.log_path = config.with_suffix(".log")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, step, "run", "--config", str(config)],
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=kept | {"PYTHONPATH": str(REPOSITORY)},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"{self.log_path.name}:\n{self.log_path.read_text(errors='replace')}")
        self.kill()

    # -- control -------------------------------------------------------------------------------------------------------

    def await_step(self) -> None:
        """Wait until a refresh of the child has reached its step."""
        line = self._pipe(self._process.stdout).readline()
        assert line.strip() == f"reached {self.step}", self.log_path.read_text(errors="replace")

    def let_go(self) -> None:
        """Let the refresh that waits at the step continue."""
        print(file=self._pipe(self._process.stdin), flush=True)

    def freeze(self) -> None:
        """Stop all its processes with SIGSTOP; its connections stay open."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        until(lambda: all(is_dead(process) or process.status() == psutil.STATUS_STOPPED for process in processes))

    def thaw(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the child and its JVM with SIGKILL, so that they cannot clean up."""
        if self._process.poll() is None:
            family = psutil.Process(self._process.pid).children(recursive=True)
            os.killpg(self._process.pid, signal.SIGKILL)
            until(lambda: all(map(is_dead, family)))
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            self._pipe(stream).close()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._process.pid

    def service_id(self, conn: psycopg.Connection[Any]) -> UUID:
        """The service's id in a database; waits until it is registered there."""
        query = "SELECT service_id FROM pgtrickle.pgt_services WHERE pid = %s AND kind = 'service'"
        found: list[tuple[UUID]] = []

        def known() -> bool:
            assert self._process.poll() is None, self.log_path.read_text(errors="replace")
            found[:] = conn.execute(query, (self._process.pid,)).fetchall()
            return bool(found)

        until(known, "the service's row in the catalog")
        return found[0][0]

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """The values of a metric with their labels; empty while the service cannot be reached."""
        try:
            with urlopen(f"http://{self._address}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except OSError:  # it is starting, or was killed
            return []
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]

    def total(self, name: str) -> float:
        """The sum of a metric over all servers and databases."""
        return sum(value for _, value in self.samples(name))

    def log(self) -> list[dict[str, str]]:
        """The entries of its log."""
        lines = self.log_path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def messages(self) -> list[str]:
        return [entry["message"] for entry in self.log()]


def _toml(service: Mapping[str, float | str | list[str]], servers: Sequence[ServerConfig]) -> str:
    """The text of a configuration file. Strings, numbers and lists are the same in JSON and TOML."""
    lines = ["[service]", *(f"{name} = {json.dumps(value)}" for name, value in service.items())]
    for server in servers:
        lines += [f"[servers.{server.name}]", f"dsn = {json.dumps(server.dsn)}"]
        if server.databases is not None:
            lines.append(f"databases = {json.dumps(server.databases)}")
    return "\n".join(lines) + "\n"


def _number(directory: Path) -> int:
    return len(list(directory.glob("*.toml"))) + 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

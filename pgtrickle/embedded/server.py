"""An embedded PostgreSQL server that is created, started, restarted, killed and stopped from Python."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

import psutil

from pgtrickle.embedded.account import hand_over, make_reachable, make_readable, server_account
from pgtrickle.embedded.binaries import ServerVersion, find_binaries, needed_directories
from pgtrickle.errors import EmbeddedServerError

HOST = "127.0.0.1"

_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_TIMEOUT = 60.0
# The kernel's limit for a socket path (that of macOS, which is smaller) minus the file name that PostgreSQL uses.
_MAX_SOCKET_DIR = 103 - len("/.s.PGSQL.65535.lock")


class EmbeddedServer:
    """A PostgreSQL server with its own data directory, reachable over TCP on localhost and over a Unix socket.

    Anyone on this machine can log in as any role (`trust` authentication): it is for demos and tests. The process that
    started the server stops it on exit. `settings` go to a file that `ALTER SYSTEM` can override.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        version: ServerVersion = 18,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        binaries: Path | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.version = version
        self.settings = dict(settings or {})
        self.log_path = self.data_dir / "server.log"
        self._config_path = self.data_dir / "pgtrickle.conf"
        self._binaries = binaries or find_binaries(version)  # may be another build of that version
        self._account = server_account()
        self._port = port
        self._port_is_given = port is not None
        self._socket_dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starter = 0

    @property
    def port(self) -> int:
        """The TCP port, chosen at the first start and kept across restarts."""
        if self._port is None:
            raise EmbeddedServerError(f"The server in {self.data_dir} has no port yet", "Call start() first.")
        return self._port

    @property
    def socket_dir(self) -> Path:
        """The directory of the Unix socket, for `host=` in a connection string."""
        if self._socket_dir is None:
            raise EmbeddedServerError(f"The server in {self.data_dir} has no socket yet", "Call start() first.")
        return self._socket_dir

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def dsn(self, dbname: str = "postgres", user: str = "postgres") -> str:
        """A connection URI over TCP."""
        return f"postgresql://{quote(user, safe='')}@{HOST}:{self.port}/{quote(dbname, safe='')}"

    def start(self) -> None:
        """Start the server and wait until it accepts connections; creates the data directory if needed."""
        if self.is_running:
            return
        self._initialize()
        attempts = 1 if self._port is not None else 5
        for attempt in range(1, attempts + 1):
            if self._port is None:
                self._port = _free_port()
            log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._write_config()
            if self._launch():
                return
            log = self.log_path.read_bytes()[log_start:].decode(errors="replace").strip()
            # Another process can take a free port before the server binds it. Retry unless the caller chose the port.
            if attempt < attempts and "could not create any TCP/IP sockets" in log:
                self._port = None
                continue
            raise EmbeddedServerError(
                f"PostgreSQL {self.version} in {self.data_dir} did not start:\n{log}",
                f"The whole log is in {self.log_path}.",
            )

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Shut the server down like `pg_ctl stop -m`; does nothing if it is not running."""
        if self._process is not None:
            self._process.send_signal(_STOP_SIGNALS[mode])
            try:
                self._process.wait(_TIMEOUT)
            except subprocess.TimeoutExpired:
                raise EmbeddedServerError(
                    f"PostgreSQL {self.version} in {self.data_dir} did not stop ({mode}) within {_TIMEOUT:.0f} s",
                    "Close its connections, stop it with mode 'immediate', or kill() it.",
                ) from None
        self._forget_process()

    def restart(self) -> None:
        """Stop the server (fast) and start it again on the same port."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL, like a crash of the machine, and wait until they are gone.

        Each backend is the leader of its own process group, so a signal to the postmaster's group would miss them.
        """
        if self._process is not None and self._process.poll() is None:
            postmaster = psutil.Process(self._process.pid)
            postmaster.suspend()  # otherwise it could start another child after they were listed
            children = postmaster.children(recursive=True)
            self._process.kill()
            for child in children:
                try:
                    child.kill()
                except psutil.NoSuchProcess:
                    continue
            self._process.wait(_TIMEOUT)
            _await_death(children)
        self._forget_process()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _initialize(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        make_reachable(self.data_dir, self._account)
        if self._config_path.exists():  # it is written only after initdb has succeeded
            found = (self.data_dir / "PG_VERSION").read_text().strip()
            if found != str(self.version):
                raise EmbeddedServerError(
                    f"The data directory {self.data_dir} belongs to PostgreSQL {found}, not {self.version}",
                    f"Start it with version={found}, or use another directory.",
                )
            return
        for directory in needed_directories(self._binaries):
            make_readable(directory, self._account)
        hand_over(self.data_dir, self._account)
        self.data_dir.chmod(0o700)
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8"]
        options.append("--locale-provider=libc")
        if self.settings.get("fsync") == "off":
            options.append("--no-sync")
        process = self._spawn(["initdb", *options, "-D", str(self.data_dir)], subprocess.PIPE)
        output, _ = process.communicate()
        if process.returncode != 0:
            raise EmbeddedServerError(
                f"initdb of PostgreSQL {self.version} failed in {self.data_dir}:\n"
                f"{output.decode(errors='replace').strip()}",
                "The directory must be new or empty, and the programs of PostgreSQL must run on this machine.",
            )
        with (self.data_dir / "postgresql.conf").open("a") as config:
            config.write(f"\ninclude '{self._config_path.name}'\n")

    def _write_config(self) -> None:
        socket_dir = self.data_dir
        if len(os.fsencode(socket_dir)) > _MAX_SOCKET_DIR:
            socket_dir = Path(tempfile.mkdtemp(prefix="pgtrickle-"))
            hand_over(socket_dir, self._account)
        self._socket_dir = socket_dir
        settings = {
            **self.settings,
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": f'"{socket_dir}"',
        }
        lines = ("{} = '{}'\n".format(name, value.replace("'", "''")) for name, value in settings.items())
        self._config_path.write_text("".join(lines))
        hand_over(self._config_path, self._account)

    def _launch(self) -> bool:
        """Run the postmaster; False if it ended before it was ready."""
        with self.log_path.open("ab") as log:
            hand_over(self.log_path, self._account)
            self._process = self._spawn(["postgres", "-D", str(self.data_dir)], log.fileno())
        self._starter = os.getpid()
        atexit.register(self._stop_at_exit)
        deadline = time.monotonic() + _TIMEOUT
        while self._process.poll() is None:
            if self._is_ready(self._process.pid):
                return True
            if time.monotonic() > deadline:
                self.kill()
                return False
            time.sleep(0.02)
        self._forget_process()
        return False

    def _is_ready(self, pid: int) -> bool:
        """Whether the postmaster's lock file says that it is ready, which is also what `pg_ctl` checks."""
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _spawn(self, command: list[str], output: int) -> subprocess.Popen[bytes]:
        # Do not pass on PGPORT, PGOPTIONS, PGTZ and so on: they are meant for other servers.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return subprocess.Popen(
            [str(self._binaries / command[0]), *command[1:]],
            cwd=self.data_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal must reach the program only, which then stops the server
            user=None if self._account is None else self._account.uid,
            group=None if self._account is None else self._account.gid,
            extra_groups=None if self._account is None else [],
        )

    def _stop_at_exit(self) -> None:
        # A forked child inherits the registration but must not stop the server.
        if os.getpid() == self._starter:
            self.stop()

    def _forget_process(self) -> None:
        self._process = None
        atexit.unregister(self._stop_at_exit)
        if self._socket_dir not in (None, self.data_dir):
            shutil.rmtree(self._socket_dir, ignore_errors=True)
        self._socket_dir = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _await_death(processes: list[psutil.Process]) -> None:
    """Wait until the killed processes are gone. Zombies that only wait to be reaped count as gone."""
    deadline = time.monotonic() + _TIMEOUT
    while any(map(_is_alive, processes)):
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"Killed processes are still there: {[process.pid for process in processes if _is_alive(process)]}",
                "They may be waiting for a device that does not answer; inspect them with ps.",
            )
        time.sleep(0.01)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

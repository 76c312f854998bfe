"""The distribution that `make dist` builds installs into an empty environment, with and without embedded PostgreSQL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from pgtrickle import __version__
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import APP_ROLE, fresh_database

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.long


def run(*command: str | Path, fails: bool = False) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYSPARK_PYTHON"}}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, cwd="/", check=False
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_distribution_works_in_an_empty_environment(tmp_path: Path, server: EmbeddedServer, kind: str) -> None:
    sources = tmp_path / "sources"  # without what earlier builds left
    shutil.copytree(REPOSITORY, sources, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info"))
    run(sys.executable, "-m", "build", f"--{kind}", "--outdir", tmp_path / "dist", sources)
    (archive,) = (tmp_path / "dist").iterdir()
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python, pgtrickle = (tmp_path / "venv" / "bin" / name for name in ("python", "pgtrickle"))
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--constraint", REPOSITORY / "constraints.txt"]
    run(*pip, archive)
    assert run(pgtrickle, "--version").strip() == f"pgtrickle, version {__version__}"
    assert "pip install 'pgtrickle[demo]'" in run(pgtrickle, "demo", "--seconds", "1", fails=True)

    with fresh_database(server, "package") as database:
        dsn = server.dsn(database.name, APP_ROLE)
        run(pgtrickle, "install", "--dsn", dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("CREATE TABLE numbers (n int PRIMARY KEY); INSERT INTO numbers VALUES (1), (2)")
            run(pgtrickle, "create", "--dsn", dsn, "twice", "SELECT n, n * 2 AS b FROM numbers")
            conn.execute("INSERT INTO numbers VALUES (3)")
            run(pgtrickle, "refresh", "--dsn", dsn, "twice")
            assert conn.execute("SELECT sum(b) FROM twice").fetchone() == (12,)

    run(*pip, f"{archive}[demo]")
    assert "every check" in run(pgtrickle, "demo", "--seconds", "5").lower()

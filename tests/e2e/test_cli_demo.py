"""The demo: it ends with success, and its server is gone however it ends."""

from __future__ import annotations

import re
import signal
import subprocess

import psycopg
import pytest

from tests.e2e.test_cli import EXECUTABLE, environment, succeed


def test_the_demo_refreshes_checks_and_ends() -> None:
    output = succeed(None, "demo", "--seconds", "8", "--rows", "2000")
    assert re.search(r"psql postgresql://shop@127\.0\.0\.1:\d+/shop", output)
    assert "check: public.open_orders OK" in output
    assert "MISMATCH" not in output
    assert output.endswith("every check: OK\n")
    assert len(re.findall(r"rows refreshed +seconds: cut [\d.]+ fetch [\d.]+ spark [\d.]+ apply [\d.]+", output)) >= 2
    _gone(_dsn(output))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_demo_and_its_server(signum: signal.Signals) -> None:
    process = subprocess.Popen(
        [EXECUTABLE, "demo", "--rows", "100", "--forever"],
        env=environment(None),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "psql" in line)
        process.send_signal(signum)
        stderr = process.communicate(timeout=120)[1]
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert stderr.endswith("interrupted\n")
    _gone(_dsn(line))


def _dsn(output: str) -> str:
    found = re.search(r"postgresql://\S+", output)
    assert found is not None
    return found[0]


def _gone(dsn: str) -> None:
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn, connect_timeout=5).close()

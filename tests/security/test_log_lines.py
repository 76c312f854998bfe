"""Names chosen by other users cannot forge lines in the service's log."""

from __future__ import annotations

import logging

import pytest

from pgtrickle.observability.logs import log_to_stderr


def test_names_cannot_forge_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    forged = "2026-11-18 00:00:00 error the service was stopped"
    logger = logging.getLogger("pgtrickle")
    former = logger.handlers[:], logger.level, logger.propagate
    log_to_stderr("text")
    try:
        try:
            raise ValueError(f"x\n{forged}\r{forged}")
        except ValueError:
            about = {"database": f"x\n{forged}\u2028{forged}", "error": f"\x1b[31m\n{forged}"}
            logger.warning("not served: %s", f"x\r\n{forged}", extra=about, exc_info=True)
    finally:
        logger.handlers[:], logger.level, logger.propagate = former
    lines = capsys.readouterr().err.splitlines()
    assert "not served: x\\r\\n2026-11-18" in lines[0]
    assert not any(line.startswith("2026-11-18 00:00:00") for line in lines)
    assert "\x1b" not in "".join(lines)

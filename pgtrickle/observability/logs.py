"""Logs of the service: one line per event, for people or for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_FIELDS = ("server", "database", "pgt_id", "error")


def _printable(text: str) -> str:
    """The text in one line, with control characters escaped: nobody's name shall look like a line of ours."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = " ".join(f"{name}={value}" for name in _FIELDS if (value := getattr(record, name, None)) is not None)
        when = datetime.fromtimestamp(record.created, UTC).astimezone()
        line = (
            f"{when:%Y-%m-%d %H:%M:%S} {record.levelname.lower()} {_printable(record.getMessage())} {_printable(about)}"
        )
        # Indented: names and messages in it come from others, too.
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        return "\n".join([line.rstrip(), *(f"    {_printable(step)}" for step in trace)])


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Stderr(logging.Handler):
    """Writes to what standard error is at the moment: while a JVM is kept quiet it is another stream (see `quiet_jvm`)."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_to_stderr(format_: str) -> None:
    """Let the service's loggers write to standard error."""
    handler = _Stderr()
    handler.setFormatter(_Json() if format_ == "json" else _Text())
    logger = logging.getLogger("pgtrickle")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False

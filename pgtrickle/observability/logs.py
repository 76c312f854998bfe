"""Logging of the service: one line per event, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_FIELDS = ("server", "database", "pgt_id", "claim", "error")
_JSON_FIELDS = (*_FIELDS, "stage", "stream_table", "figures")  # which the message of a text line has, too


def _printable(text: str) -> str:
    """The text as a single line with control characters escaped, so that a name cannot forge a log line."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = " ".join(f"{name}={value}" for name in _FIELDS if (value := getattr(record, name, None)) is not None)
        when = datetime.fromtimestamp(record.created, UTC).astimezone()
        line = (
            f"{when:%Y-%m-%d %H:%M:%S} {record.levelname.lower()} {_printable(record.getMessage())} {_printable(about)}"
        )
        # Indented, because names and messages in it are not under our control either.
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
        entry |= {name: value for name in _JSON_FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, which `quiet_jvm` temporarily replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_to_stderr(format_: str, level: str = "info") -> None:
    """Send the service's log to standard error, as `text` or `json`. `debug` also logs every stage of every refresh."""
    handler = _Stderr()
    handler.setFormatter(_Json() if format_ == "json" else _Text())
    logger = logging.getLogger("pgtrickle")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False

"""Tracing which modules of pgtrickle a call goes through."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pgtrickle

ROOT = Path(pgtrickle.__file__).parent


@dataclass
class Trace:
    """The calls of functions of pgtrickle in this thread, by module, and the switches from one module to another."""

    calls: Counter[str] = field(default_factory=Counter)
    switches: int = 0
    _last: str = ""

    def add(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "<module>" or not path.is_relative_to(ROOT):
            return
        module = str(path.relative_to(ROOT))
        self.calls[module] += 1
        self.switches += module != self._last
        self._last = module

    def __str__(self) -> str:
        return f"{self.calls.total()} calls in {len(self.calls)} modules, {self.switches} switches"


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace the calls in the block."""
    trace = Trace()
    sys.setprofile(trace.add)
    try:
        yield trace
    finally:
        sys.setprofile(None)

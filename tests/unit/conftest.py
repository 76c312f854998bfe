"""Profiles of Hypothesis: `short` takes seconds, `PGTRICKLE_EXAMPLES=long` takes minutes."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A query with its tables is a large example, which takes milliseconds to draw.
_COMMON = settings(
    deadline=None,
    derandomize="CI" in os.environ,  # a submission fails for what it changed, not for what nobody has tried before
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

settings.register_profile("short", _COMMON, max_examples=120)
settings.register_profile("long", _COMMON, max_examples=2_000)
settings.load_profile(os.environ.get("PGTRICKLE_EXAMPLES", "short"))

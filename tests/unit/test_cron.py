"""The next due time of cron schedules."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pgtrickle.service.scheduling.cron import ScheduleError, next_time


@pytest.mark.parametrize(
    ("schedule", "timezone", "after", "expected"),
    [
        ("*/5 * * * *", "UTC", "2026-01-01T00:02", "2026-01-01T00:05"),
        ("@hourly", "UTC", "2026-01-01T00:02", "2026-01-01T01:00"),
        ("@daily", "Europe/Berlin", "2026-01-01T12:00", "2026-01-01T23:00"),
        ("CRON_TZ=Asia/Tokyo 0 9 * * *", "UTC", "2026-01-01T12:00", "2026-01-02T00:00"),
        # The hour between two and three does not exist on that day: half past two comes right after it.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", "2026-03-29T01:00"),
        ("0 0 * * mon", "UTC", "2026-01-01T00:00", "2026-01-05T00:00"),
    ],
)
def test_next_time(schedule: str, timezone: str, after: str, expected: str) -> None:
    found = next_time(schedule, timezone, datetime.fromisoformat(after).replace(tzinfo=UTC))
    assert found.astimezone(UTC) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


@pytest.mark.parametrize("schedule", ["CRON_TZ=Moon/Base * * * * *", "61 * * * *", "0 0 30 2 *"])
def test_an_invalid_schedule_is_an_error(schedule: str) -> None:
    with pytest.raises(ScheduleError, match="schedule"):
        next_time(schedule, "UTC", datetime.now(UTC))

"""Cron schedules: when is the next time?"""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}


class ScheduleError(ValueError):
    """A schedule that means nothing."""


def next_time(schedule: str, timezone: str, after: datetime) -> datetime:
    """The first moment of a cron schedule after another; in its own time zone, or the one given."""
    text = schedule
    if text.startswith("CRON_TZ="):
        timezone, _, text = text.removeprefix("CRON_TZ=").partition(" ")
    text = _NICKNAMES.get(text.strip(), text.strip())
    try:
        local = after.astimezone(ZoneInfo(timezone))
        return next(CronSim(text, local))
    except ZoneInfoNotFoundError as error:
        raise ScheduleError(f"schedule {schedule!r}: there is no time zone {timezone}") from error
    except CronSimError as error:
        raise ScheduleError(f"schedule {schedule!r}: {error}") from error
    except StopIteration as error:
        raise ScheduleError(f"schedule {schedule!r} never comes") from error

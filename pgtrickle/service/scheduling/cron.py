"""Cron schedules: compute the next due time."""

from __future__ import annotations

import re
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


_DURATION = re.compile(r"([0-9]+(ms|s|m|h|d|w))+")
LONGEST = 500  # characters, enough to list every minute, hour, day and month


class ScheduleError(ValueError):
    """The schedule is not valid."""


def next_time(schedule: str, timezone: str, after: datetime) -> datetime:
    """The first time of a cron schedule after `after`, in the schedule's own time zone or else in `timezone`.

    Schedules are written by owners: anything wrong with one raises ScheduleError.
    """
    if len(schedule) > LONGEST:
        raise ScheduleError(f"schedule '{schedule[:40]}…' is longer than {LONGEST} characters")
    if _DURATION.fullmatch(schedule):  # the database did not accept it as an interval
        raise ScheduleError(f"schedule {schedule!r} is a duration of zero or of more than ten years")
    text = schedule
    if text.startswith("CRON_TZ="):
        timezone, _, text = text.removeprefix("CRON_TZ=").partition(" ")
    text = _NICKNAMES.get(text.strip(), text.strip())
    try:
        local = after.astimezone(ZoneInfo(timezone))
    except (ZoneInfoNotFoundError, ValueError, OverflowError, OSError) as error:  # time zones are looked up as files
        raise ScheduleError(f"schedule {schedule!r}: there is no time zone {timezone[:LONGEST]!r}") from error
    try:
        return next(CronSim(text, local))
    except StopIteration as error:
        raise ScheduleError(f"schedule {schedule!r} never comes") from error
    except (CronSimError, ValueError, OverflowError) as error:
        raise ScheduleError(f"schedule {schedule!r}: {error}") from error

"""Cron schedules: when is the next time?"""

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
LONGEST = 500  # characters; every minute, hour, day and month can be listed in fewer


class ScheduleError(ValueError):
    """A schedule that means nothing."""


def next_time(schedule: str, timezone: str, after: datetime) -> datetime:
    """The first moment of a cron schedule after another; in its own time zone, or the one given.

    Owners write schedules: whatever is wrong with one is a ScheduleError.
    """
    if len(schedule) > LONGEST:
        raise ScheduleError(f"schedule '{schedule[:40]}…' is longer than {LONGEST} characters")
    if _DURATION.fullmatch(schedule):  # the database makes no interval of it
        raise ScheduleError(f"schedule {schedule!r} is a duration of nothing or of more than ten years")
    text = schedule
    if text.startswith("CRON_TZ="):
        timezone, _, text = text.removeprefix("CRON_TZ=").partition(" ")
    text = _NICKNAMES.get(text.strip(), text.strip())
    try:
        local = after.astimezone(ZoneInfo(timezone))
    except (ZoneInfoNotFoundError, ValueError, OverflowError, OSError) as error:  # it is looked for as a file
        raise ScheduleError(f"schedule {schedule!r}: there is no time zone {timezone[:LONGEST]!r}") from error
    try:
        return next(CronSim(text, local))
    except StopIteration as error:
        raise ScheduleError(f"schedule {schedule!r} never comes") from error
    except (CronSimError, ValueError, OverflowError) as error:
        raise ScheduleError(f"schedule {schedule!r}: {error}") from error

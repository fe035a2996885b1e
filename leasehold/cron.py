"""When a schedule fires: five-field cron in an IANA time zone.

Daylight saving follows Debian's cron, by cronsim: a time that the clock skips fires once, right after the gap; a time
that it repeats fires once, the first time; `*` in minutes or hours fires by real time.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from leasehold.errors import Invalid

_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FIELDS = 5


def check(cron: str, timezone: str) -> None:
    """Raises Invalid: `invalid_timezone`, `invalid_cron`, also for one that never fires."""
    zone(timezone)
    if next_after(cron, timezone, datetime.now(UTC)) is None:
        raise Invalid("invalid_cron", "This schedule never fires.")


def zone(name: str) -> ZoneInfo:
    """Raises Invalid `invalid_timezone`."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise Invalid("invalid_timezone", "This is not an IANA time zone, such as Europe/Berlin.") from None


def ticks(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """The instants after `after`, in UTC, in order; it ends where nothing comes for fifty years.

    Raises Invalid `invalid_cron`.
    """
    expression = _ALIASES.get(cron.strip(), cron)
    if len(expression.split()) != _FIELDS:
        raise Invalid("invalid_cron", "A cron expression has five fields: minute hour day-of-month month day-of-week.")
    try:
        found = CronSim(expression, after.astimezone(zone(timezone)))
    except CronSimError as error:
        raise Invalid("invalid_cron", f"Not a cron expression: {error}.") from None
    except OverflowError:
        raise Invalid("range_too_long", "In this time zone there is no such instant.") from None
    return _in_utc(found)


def _in_utc(found: Iterator[datetime]) -> Iterator[datetime]:
    try:
        for tick in found:
            yield tick.astimezone(UTC)
    except OverflowError:  # beyond the years 1 to 9999
        return


def next_after(cron: str, timezone: str, after: datetime) -> datetime | None:
    return next(ticks(cron, timezone, after), None)


def between(cron: str, timezone: str, after: datetime, until: datetime, most: int) -> list[datetime]:
    """The ticks in (after, until], at most `most` of them, the earliest first."""
    found = takewhile(lambda tick: tick <= until, ticks(cron, timezone, after))
    return [tick for _, tick in zip(range(most), found, strict=False)]

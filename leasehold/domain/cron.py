"""When a schedule fires: five-field cron in an IANA time zone.

Daylight saving follows Debian's cron, by cronsim: a time that the clock skips fires once, right after the gap; a time
that it repeats fires once, the first time; `*` in minutes or hours fires by real time.

Zones are those that the package `tzdata` ships, by name and by rules, and never the host's: what the API has accepted
each worker knows, whatever machine it runs on.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from itertools import takewhile
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from leasehold.domain.errors import Invalid

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
#: Instants from clients lie between these: every zone's clock can show them, and PostgreSQL can keep them.
FIRST = datetime(1970, 1, 1, tzinfo=UTC)
LAST = datetime(2999, 12, 31, tzinfo=UTC)


def check(cron: str, timezone: str) -> None:
    """Raises Invalid: `invalid_timezone`, `invalid_cron`, also for one that never fires."""
    zone(timezone)
    if next_after(cron, timezone, datetime.now(UTC)) is None:
        raise Invalid("invalid_cron", "This schedule never fires.")


@cache
def zone_names() -> frozenset[str]:
    """The IANA time zones that schedules may name."""
    return frozenset(resources.files("tzdata").joinpath("zones").read_text("utf-8").split())


def zone(name: str) -> ZoneInfo:
    """Raises Invalid `invalid_timezone`."""
    if name not in zone_names():
        raise Invalid("invalid_timezone", "This is not an IANA time zone, such as Europe/Berlin.")
    return _load(name)


@cache
def _load(name: str) -> ZoneInfo:
    with resources.files("tzdata.zoneinfo").joinpath(*name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def ticks(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """The instants after `after`, in UTC, in order; it ends where nothing comes for fifty years.

    Raises Invalid `invalid_cron`, and `range_too_long` where the zone's clock cannot show `after`.
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

"""The instants at which a schedule fires: five-field cron expressions in an IANA time zone.

The library cronsim finds the local times that an expression names. This module finds the instants at which the clock
shows these times. If the clock skips a time, the schedule fires once, right after the gap. If the clock shows a time
twice, the schedule fires once, the first time.

Exception, as in Debian's cron: two other rules hold for an expression whose field of the minutes or of the hours begins
with `*`. If the clock shows a time twice, such a schedule fires both times. If the clock skips a time, such a schedule
fires only if the expression names no time shortly after the gap (within a period as long as the gap).

Time zones come from the package `tzdata`, never from the host, because every worker must know each zone that the API
accepted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from itertools import dropwhile, islice, takewhile
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from leasehold.domain.errors import Invalid
from leasehold.domain.sentences import full_stop

#: Names that a schedule may use in place of a cron expression.
ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
#: How many fields an expression has.
_FIELDS = 5
#: The value of `_shift_at` for a time that the clock shows exactly once.
_NO_SHIFT = timedelta(0)
#: Two firing instants of an expression are never closer to each other than this.
_CLOSEST = timedelta(seconds=1)
#: A client's instant must lie between FIRST and LAST, so that every zone can show it and PostgreSQL can store it.
FIRST = datetime(1970, 1, 1, tzinfo=UTC)
LAST = datetime(2999, 12, 31, tzinfo=UTC)


def check(cron: str, timezone: str) -> None:
    """Raises Invalid: `invalid_timezone`, or `invalid_cron` for a bad expression or a schedule that never fires."""
    zone(timezone)
    if next_after(cron, timezone, datetime.now(UTC)) is None:
        raise Invalid("invalid_cron", "This schedule never fires.")


@cache
def zone_names() -> frozenset[str]:
    """The IANA time zones that schedules may name."""
    return frozenset(resources.files("tzdata").joinpath("zones").read_text("utf-8").split())


def zone(name: str) -> ZoneInfo:
    """The time zone. Raises Invalid `invalid_timezone`."""
    if name not in zone_names():
        raise Invalid("invalid_timezone", "This is not an IANA time zone, such as Europe/Berlin.")
    return _load(name)


@cache
def _load(name: str) -> ZoneInfo:
    with resources.files("tzdata.zoneinfo").joinpath(*name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def ticks(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """The firing instants later than `after`, in UTC, in order. The iterator ends when the next instant is more than
    fifty years away.

    Raises Invalid: `invalid_cron`, or `range_too_long` when the zone cannot show `after`.
    """
    expression = ALIASES.get(cron.strip(), cron)
    if len(expression.split()) != _FIELDS:
        raise Invalid("invalid_cron", "A cron expression has five fields: minute hour day-of-month month day-of-week.")
    local_zone = zone(timezone)
    try:
        local_times = CronSim(expression, _start(after.astimezone(local_zone)))
    except CronSimError as error:
        raise Invalid("invalid_cron", full_stop(f"Not a cron expression: {error}")) from None
    except OverflowError:
        raise Invalid("range_too_long", "This instant does not exist in this time zone.") from None
    return dropwhile(lambda instant: instant <= after, _instants(expression, local_times, local_zone))


def _start(after: datetime) -> datetime:
    """The local time after which to search. Usually it is the local time of `after`. If the clock will show this local
    time a second time, the search begins earlier, by the length of the repetition. The reason: the clock will also show
    the local times just before `after` a second time, and those instants are later than `after`.
    """
    clock_time = after.replace(tzinfo=None, fold=0)
    return clock_time if after.fold else clock_time + min(_shift_at(after), _NO_SHIFT)


def _shift_at(local_time: datetime) -> timedelta:
    """By how much the clock is put forward or back at this time. More than 0: the clock skips this time, and the result
    is the length of the gap. Less than 0: the clock shows this time twice, and the result is minus the length of the
    repetition. 0: neither.
    """
    before, after = local_time.replace(fold=0).utcoffset(), local_time.replace(fold=1).utcoffset()
    assert before is not None
    assert after is not None
    return after - before


def _instants(expression: str, local_times: Iterator[datetime], local_zone: ZoneInfo) -> Iterator[datetime]:
    """The instants at which the schedule fires for these local times, in order, by the rules in the module's head. If a
    repeated time fires twice, its second instant stays in `repeated` until all earlier instants were yielded.
    """
    has_star = any(field.startswith("*") for field in expression.split()[:2])
    repeated: deque[datetime] = deque()  # instants at which the clock shows one of these times again
    last: datetime | None = None
    try:
        for clock_time in local_times:
            local_time = clock_time.replace(tzinfo=local_zone)
            shift = _shift_at(local_time)
            instant = local_time.astimezone(UTC) if shift <= _NO_SHIFT else _end_of_gap(local_time)
            if has_star and shift > _NO_SHIFT and _fires_within(expression, instant.astimezone(local_zone), shift):
                continue  # a skipped time, and the expression names a time shortly after the gap
            while repeated and repeated[0] < instant:
                yield repeated.popleft()
            if instant != last:  # all times of one gap have the same instant
                yield instant
            last = instant
            if has_star and shift < _NO_SHIFT:
                repeated.append(instant - shift)
    except OverflowError:  # beyond the years 1 to 9999
        return
    yield from repeated


def _end_of_gap(local_time: datetime) -> datetime:
    """The instant at which the clock is put forward over this time, which is the first instant with the new UTC offset.
    A bisection finds it, to the second, between the instants that this time would have with the new and with the old
    offset.
    """
    offset_before = local_time.utcoffset()
    lower, upper = local_time.replace(fold=1).astimezone(UTC), local_time.astimezone(UTC)

    def is_after(seconds: int) -> bool:
        return (lower + timedelta(seconds=seconds)).astimezone(local_time.tzinfo).utcoffset() != offset_before

    seconds = range(int((upper - lower).total_seconds()))
    return lower + timedelta(seconds=bisect_left(seconds, True, key=is_after))


def _fires_within(expression: str, start: datetime, length: timedelta) -> bool:
    """Whether the expression names a time from `start` on, before `length` has passed."""
    clock_time = start.replace(tzinfo=None)
    next_time = next(CronSim(expression, clock_time - timedelta(seconds=1)), None)
    return next_time is not None and next_time < clock_time + length


def next_after(cron: str, timezone: str, after: datetime) -> datetime | None:
    """The first firing instant later than `after`, in UTC. None: the schedule never fires again. Raises as `ticks`."""
    return next(ticks(cron, timezone, after), None)


def between(cron: str, timezone: str, after: datetime, until: datetime, at_most: int) -> list[datetime]:
    """The firing instants in (after, until], the earliest first, at most `at_most`. Raises as `ticks`."""
    due_ticks = takewhile(lambda tick: tick <= until, ticks(cron, timezone, after))
    return list(islice(due_ticks, at_most))


def latest(cron: str, timezone: str, after: datetime, until: datetime) -> datetime | None:
    """The last firing instant in (after, until]. None: the schedule does not fire then. Raises as `ticks`.

    The function does not go through all firing instants. It halves, again and again, the period in which the last
    instant lies. So the cost does not grow with the number of instants.
    """
    found = next_after(cron, timezone, after)
    if found is None or found > until:
        return None
    search_until = until  # no firing instant lies in (search_until, until]
    while search_until - found >= _CLOSEST:
        middle = found + (search_until - found) / 2
        later = next_after(cron, timezone, middle)
        if later is not None and later <= until:
            found = later
        else:
            search_until = middle
    return found

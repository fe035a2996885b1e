"""The instants at which a schedule fires: five-field cron expressions in an IANA time zone.

When daylight saving begins or ends, the library cronsim follows Debian's cron. A time that the clock skips fires once,
right after the gap. A time that the clock repeats fires once, the first time. Exception: a schedule with `*` in minutes
or hours fires by elapsed time.

Time zones come from the package `tzdata`, never from the host, because every worker must know each zone that the API
accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from itertools import islice, takewhile
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
_FIELDS = 5
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


class _LocalTicks(CronSim):
    """As CronSim, but a day whose midnight the clock skips begins after the gap. CronSim begins it at a time that does
    not exist, and then leaves out the hour after the gap.
    """

    def advance_day(self) -> bool:
        is_other_day = super().advance_day()
        self._leave_gap()
        return is_other_day

    def advance_month(self) -> None:
        super().advance_month()
        self._leave_gap()

    def _leave_gap(self) -> None:
        if self.dt.tzinfo is not None:  # None: CronSim itself treats the gaps of schedules at fixed times
            self.dt = self.dt.astimezone(UTC).astimezone(self.dt.tzinfo)


def ticks(cron: str, timezone: str, after: datetime) -> Iterator[datetime]:
    """The firing instants later than `after`, in UTC, in order. The iterator ends when the next instant is more than
    fifty years away.

    Raises Invalid: `invalid_cron`, or `range_too_long` when the zone cannot show `after`.
    """
    expression = ALIASES.get(cron.strip(), cron)
    if len(expression.split()) != _FIELDS:
        raise Invalid("invalid_cron", "A cron expression has five fields: minute hour day-of-month month day-of-week.")
    try:
        local_ticks = _LocalTicks(expression, after.astimezone(zone(timezone)))
    except CronSimError as error:
        raise Invalid("invalid_cron", full_stop(f"Not a cron expression: {error}")) from None
    except OverflowError:
        raise Invalid("range_too_long", "This instant does not exist in this time zone.") from None
    return _in_utc(local_ticks, after)


def _in_utc(local_ticks: Iterator[datetime], after: datetime) -> Iterator[datetime]:
    """The ticks later than `after`. While the clock repeats an hour, CronSim also names ticks of the first time, which
    have passed.
    """
    try:
        for local_tick in local_ticks:
            if (tick := local_tick.astimezone(UTC)) > after:
                yield tick
    except OverflowError:  # beyond the years 1 to 9999
        return


def next_after(cron: str, timezone: str, after: datetime) -> datetime | None:
    """The first firing instant later than `after`, in UTC. None: the schedule never fires again. Raises as `ticks`."""
    return next(ticks(cron, timezone, after), None)


def between(cron: str, timezone: str, after: datetime, until: datetime, at_most: int) -> list[datetime]:
    """The firing instants in (after, until], the earliest first, at most `at_most`. Raises as `ticks`."""
    due_ticks = takewhile(lambda tick: tick <= until, ticks(cron, timezone, after))
    return list(islice(due_ticks, at_most))

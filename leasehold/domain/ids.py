"""Makes and reads the ids of rows. They are UUIDv7, which sort by creation time, so new rows go to the right edge of an
index.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from uuid_utils.compat import uuid7

from leasehold.domain.errors import Invalid

#: A program may give a new run an id of its own. By the clock of that program, the id's time is at most MAX_AGE in the
#: past, and at most MAX_LEAD in the future.
MAX_AGE, MAX_LEAD = timedelta(hours=24), timedelta(minutes=1)
_TIMED_VERSION = 7  # the version of UUIDs that begin with a time


def new_id() -> UUID:
    return uuid7()


def id_of(value: object) -> UUID:
    """The id that a program names. `value`: a UUID of the standard library or of another library, or the text of a
    UUID. Raises Invalid `invalid_id`.
    """
    if isinstance(value, UUID):
        return value
    octets = getattr(value, "bytes", None)
    try:
        if isinstance(value, str):
            return UUID(value)
        if isinstance(octets, bytes):
            return UUID(bytes=octets)
    except ValueError:
        pass
    raise Invalid("invalid_id", f"The id of a run is a UUID or the text of one, not {repr(value)[:100]}.")


def id_of_new_run(value: object) -> UUID:
    """Does the same as `id_of`, for the id that a program gives to a new run. But it raises Invalid `invalid_id` also
    for a UUID that is not recent (`is_recent`). The reason: lists have the jobs in the order of their ids, and filters
    find the jobs of a period by the times in their ids.
    """
    run_id = id_of(value)
    if not is_recent(run_id):
        hours = MAX_AGE // timedelta(hours=1)
        raise Invalid(
            "invalid_id",
            f"The id of a new run is a UUIDv7 of the last {hours} hours, not {run_id}: uuid7() of uuid_utils.compat"
            " makes one.",
        )
    return run_id


def is_recent(value: UUID) -> bool:
    """Whether the id is a UUIDv7 that was made at most MAX_AGE ago, and is at most MAX_LEAD ahead of the clock."""
    try:
        age = datetime.now(UTC) - instant_of(value)
    except (ValueError, OverflowError):
        return False
    return -MAX_LEAD <= age <= MAX_AGE


def id_of_instant(instant: datetime) -> UUID:
    """An id for comparisons with ids of rows. Ids that were made in an earlier millisecond than `instant` sort before
    this id; the order within a millisecond is random.
    """
    return uuid7(nanoseconds=int(instant.timestamp() * 1_000_000_000))


def instant_of(row_id: UUID) -> datetime:
    """The time at which a UUIDv7 was made, in whole milliseconds. Raises ValueError for a UUID of another version.
    Raises ValueError or OverflowError for a time that a datetime cannot hold.
    """
    if row_id.version != _TIMED_VERSION:
        raise ValueError(f"{row_id} has no time: it is no UUIDv7")
    return datetime.fromtimestamp((row_id.int >> 80) / 1000, UTC)

"""Makes the ids of rows: UUIDv7. They sort by creation time, so new rows go to the right edge of an index."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from uuid_utils.compat import uuid7

from leasehold.domain.errors import Invalid


def new_id() -> UUID:
    return uuid7()


def id_of(value: object) -> UUID:
    """The id that a program names: a UUID, also of a library other than the standard one, or its text. Raises Invalid
    `invalid_id`.
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


def id_of_instant(instant: datetime) -> UUID:
    """An id for comparisons with ids of rows. Ids that were made in an earlier millisecond than `instant` sort before
    this id; the order within a millisecond is random.
    """
    return uuid7(nanoseconds=int(instant.timestamp() * 1_000_000_000))


def instant_of(row_id: UUID) -> datetime:
    """The time at which a UUIDv7 was made, in whole milliseconds. Raises ValueError or OverflowError for most other
    ids.
    """
    return datetime.fromtimestamp((row_id.int >> 80) / 1000, UTC)

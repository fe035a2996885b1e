"""UUIDv7: sortable by creation, so that new rows land on the right edge of an index."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from uuid_utils.compat import uuid7


def new_id() -> UUID:
    return uuid7()


def id_at(instant: datetime) -> UUID:
    """An id like one that was made then: older ones sort before it."""
    return uuid7(nanoseconds=int(instant.timestamp() * 1_000_000_000))

"""UUIDv7: sortable by creation, so that new rows land on the right edge of an index."""

from __future__ import annotations

from uuid import UUID

from uuid_utils.compat import uuid7


def new_id() -> UUID:
    return uuid7()

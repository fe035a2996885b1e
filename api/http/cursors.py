"""Opaque cursors: where a page ended, in base64url. They hold nothing secret, and a wrong one is told so.

Every text of the right length and letters is the cursor of some place: so the document can say what is accepted.
"""

from __future__ import annotations

import base64
import binascii
from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeAlias
from uuid import UUID

from fastapi import Query
from pydantic import Field

from leasehold.domain.cron import FIRST, LAST
from leasehold.domain.errors import Invalid

_MOST = 200
_ID, _INSTANT = 16, 8
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


#: Told and not enforced: what lists gave before is taken, too, and a wrong cursor has a code of its own.
#: Of a list in the order of ids, and of one in the order of instants.
IdCursor: TypeAlias = Annotated[
    Annotated[str, Field(max_length=_MOST, json_schema_extra={"pattern": "^[A-Za-z0-9_-]{21}[AQgw]$"})] | None,
    Query(description="The `next_cursor` of the page before."),
]
InstantCursor: TypeAlias = Annotated[
    Annotated[str, Field(max_length=_MOST, json_schema_extra={"pattern": "^[A-Za-z0-9_-]{32}$"})] | None,
    Query(description="The `next_cursor` of the page before."),
]


def cursor_of(*parts: UUID | datetime) -> str:
    said = b"".join(_packed(part) for part in parts)
    return base64.urlsafe_b64encode(said).decode().rstrip("=")


def _packed(part: UUID | datetime) -> bytes:
    if isinstance(part, datetime):
        return ((part - _EPOCH) // _MICROSECOND).to_bytes(_INSTANT, "big", signed=True)
    return UUID(str(part)).bytes  # the driver has a kind of its own


def _unpacked(cursor: str) -> bytes:
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _malformed() from None


def _malformed() -> Invalid:
    return Invalid("invalid_cursor", "The cursor is not one that a list of ours has given.")


def id_at(cursor: str | None) -> UUID | None:
    if cursor is None:
        return None
    packed = _unpacked(cursor)
    if len(packed) == _ID:
        return UUID(bytes=packed)
    return _id_as_text(packed)


def instant_and_id_at(cursor: str | None) -> tuple[datetime, UUID] | None:
    if cursor is None:
        return None
    packed = _unpacked(cursor)
    if len(packed) == _INSTANT + _ID:
        return _instant(int.from_bytes(packed[:_INSTANT], "big", signed=True)), UUID(bytes=packed[_INSTANT:])
    instant, _, number = packed.partition(b"\n")
    try:  # as they were before
        found = datetime.fromisoformat(instant.decode()), _id_as_text(number)
    except ValueError:
        raise _malformed() from None
    if found[0].tzinfo is None or not FIRST <= found[0] <= LAST:
        raise _malformed()
    return found


def _id_as_text(packed: bytes) -> UUID:
    try:  # as they were before
        return UUID(packed.decode())
    except ValueError:
        raise _malformed() from None


def _instant(microseconds: int) -> datetime:
    """The nearest that there is."""
    try:
        return min(max(_EPOCH + timedelta(microseconds=microseconds), FIRST), LAST)
    except OverflowError:
        return FIRST if microseconds < 0 else LAST

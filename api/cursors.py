"""Opaque cursors: where a page ended, in base64url. They hold nothing secret, and a wrong one is told so."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime
from uuid import UUID

from leasehold.cron import FIRST, LAST
from leasehold.errors import Invalid


def cursor_of(*parts: str | UUID | datetime) -> str:
    said = "\n".join(part.isoformat() if isinstance(part, datetime) else str(part) for part in parts)
    return base64.urlsafe_b64encode(said.encode()).decode().rstrip("=")


def _parts(cursor: str, number: int) -> list[str]:
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        parts = base64.b64decode(padded, altchars=b"-_", validate=True).decode().split("\n")
    except (binascii.Error, ValueError):
        raise _malformed() from None
    if len(parts) != number:
        raise _malformed()
    return parts


def _malformed() -> Invalid:
    return Invalid("invalid_cursor", "The cursor is not one that a list of ours has given.")


def id_at(cursor: str | None) -> UUID | None:
    if cursor is None:
        return None
    try:
        return UUID(_parts(cursor, 1)[0])
    except ValueError:
        raise _malformed() from None


def instant_and_id_at(cursor: str | None) -> tuple[datetime, UUID] | None:
    if cursor is None:
        return None
    instant, number = _parts(cursor, 2)
    try:
        found = datetime.fromisoformat(instant), UUID(number)
    except ValueError:
        raise _malformed() from None
    if found[0].tzinfo is None or not FIRST <= found[0] <= LAST:
        raise _malformed()
    return found

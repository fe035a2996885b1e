"""Opaque cursors of lists. A cursor names the last row of a page, in base64url. Depending on the list, it has the row's
id, an instant and the id, a name and a version, or two texts. A cursor contains no secret.

Every text of the right length and alphabet is a valid cursor, so that the OpenAPI document can have the exact pattern.
Cursors of earlier releases are also valid. Any other text is refused with `invalid_cursor`.
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

#: The longest cursor of the other forms, in characters.
_MAX_CHARACTERS = 200
#: The longest cursor of two texts, in characters. A concurrency limit has the longest texts: 400 bytes of UTF-8 for its
#: tenant and 2,141 for its key, together 2,541 (fleet/operators.py).
_MAX_TEXTS_CHARACTERS = 3392
_ID_BYTES, _INSTANT_BYTES = 16, 8  # an instant is a number of microseconds since 1970
#: Bytes of a version, and of a name. The longest name of a template has 63 bytes.
_VERSION_BYTES, _NAME_BYTES = 2, 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

#: The cursors of lists that are sorted by ids, by instants, and by names with versions. An id has 128 bits, and the
#: first 21 characters of its cursor carry 126 of them. So the last character carries only two bits: it is A, Q, g or w.
#: The API documents the patterns, but does not enforce them, because it also accepts cursors of earlier releases. It
#: refuses a wrong cursor with a separate error code.
IdCursor: TypeAlias = Annotated[
    Annotated[str, Field(max_length=_MAX_CHARACTERS, json_schema_extra={"pattern": "^[A-Za-z0-9_-]{21}[AQgw]$"})]
    | None,
    Query(description="The `next_cursor` of the page before."),
]
InstantCursor: TypeAlias = Annotated[
    Annotated[str, Field(max_length=_MAX_CHARACTERS, json_schema_extra={"pattern": "^[A-Za-z0-9_-]{32}$"})] | None,
    Query(description="The `next_cursor` of the page before."),
]
VersionCursor: TypeAlias = Annotated[
    Annotated[str, Field(max_length=_MAX_CHARACTERS, json_schema_extra={"pattern": "^[A-Za-z0-9_-]{88}$"})] | None,
    Query(description="The `next_cursor` of the page before."),
]

#: The cursor of a list that is sorted by two texts.
TextsCursor: TypeAlias = Annotated[
    Annotated[
        str,
        Field(
            max_length=_MAX_TEXTS_CHARACTERS,
            json_schema_extra={"pattern": f"^([A-Za-z0-9_-]{{4}}){{1,{_MAX_TEXTS_CHARACTERS // 4}}}$"},
        ),
    ]
    | None,
    Query(description="The `next_cursor` of the page before."),
]


def cursor_of_texts(first: str, second: str) -> str:
    """The cursor of a list that is sorted by two texts."""
    packed = f"{first}\x00{second}".encode()  # a text in PostgreSQL contains no NUL
    padding = b"\x00" * (-len(packed) % 3)  # with a multiple of 3 bytes, base64 needs no "="
    return base64.urlsafe_b64encode(packed + padding).decode()


def texts_of_cursor(cursor: str | None) -> tuple[str, str] | None:
    """The two texts of the row that the page follows. Returns None for the first page. Raises Invalid."""
    if cursor is None:
        return None
    packed = _unpack(cursor)
    if not packed:
        raise _malformed_cursor()
    first, _, second = packed.decode("utf-8", "ignore").partition("\x00")
    return first, second.replace("\x00", "")


def cursor_of_version(name: str, version: int) -> str:
    """The cursor of a list that is sorted by names with versions. The cursor has the same length for every name."""
    packed = version.to_bytes(_VERSION_BYTES, "big") + name.encode().ljust(_NAME_BYTES, b"\x00")
    return base64.urlsafe_b64encode(packed).decode()


def version_of_cursor(cursor: str | None) -> tuple[str, int] | None:
    """The name and the version of the row that the page follows. Returns None for the first page. Raises Invalid."""
    if cursor is None:
        return None
    packed = _unpack(cursor)
    if len(packed) != _VERSION_BYTES + _NAME_BYTES:
        raise _malformed_cursor()
    # Drops the NULs at the end. Also drops characters that no name has, because an invented cursor may contain them.
    name = "".join(letter for letter in packed[_VERSION_BYTES:].decode("ascii", "ignore") if letter.isprintable())
    return name, int.from_bytes(packed[:_VERSION_BYTES], "big")


def cursor_of(*parts: UUID | datetime) -> str:
    """The cursor of a list that is sorted by ids, or by instants and then ids."""
    packed = b"".join(_pack(part) for part in parts)
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def _pack(part: UUID | datetime) -> bytes:
    if isinstance(part, datetime):
        return ((part - _EPOCH) // _MICROSECOND).to_bytes(_INSTANT_BYTES, "big", signed=True)
    return UUID(str(part)).bytes  # asyncpg has its own UUID type


def _unpack(cursor: str) -> bytes:
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _malformed_cursor() from None


def _malformed_cursor() -> Invalid:
    return Invalid("invalid_cursor", "The cursor is malformed. Send the next_cursor of the page before.")


def id_of_cursor(cursor: str | None) -> UUID | None:
    """The id of the row that the page follows. Returns None for the first page. Raises Invalid."""
    if cursor is None:
        return None
    packed = _unpack(cursor)
    if len(packed) == _ID_BYTES:
        return UUID(bytes=packed)
    return _id_from_text(packed)


def instant_and_id_of_cursor(cursor: str | None) -> tuple[datetime, UUID] | None:
    """The instant and the id of the row that the page follows. Returns None for the first page. Raises Invalid."""
    if cursor is None:
        return None
    packed = _unpack(cursor)
    if len(packed) == _INSTANT_BYTES + _ID_BYTES:
        microseconds = int.from_bytes(packed[:_INSTANT_BYTES], "big", signed=True)
        return _bounded_instant(microseconds), UUID(bytes=packed[_INSTANT_BYTES:])
    instant_text, _, id_text = packed.partition(b"\n")
    try:  # the format of earlier releases
        instant, row_id = datetime.fromisoformat(instant_text.decode()), _id_from_text(id_text)
    except ValueError:
        raise _malformed_cursor() from None
    if instant.tzinfo is None or not FIRST <= instant <= LAST:
        raise _malformed_cursor()
    return instant, row_id


def _id_from_text(packed: bytes) -> UUID:
    try:  # the format of earlier releases
        return UUID(packed.decode())
    except ValueError:
        raise _malformed_cursor() from None


def _bounded_instant(microseconds: int) -> datetime:
    """The instant, moved to FIRST or LAST if it lies outside of this range. The instants of all rows lie within it."""
    try:
        return min(max(_EPOCH + timedelta(microseconds=microseconds), FIRST), LAST)
    except OverflowError:
        return FIRST if microseconds < 0 else LAST

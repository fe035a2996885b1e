"""Declares types for numbers, flags and instants in Pydantic models. These types are as strict as the OpenAPI document.

Without these types Pydantic accepts `true` and "1" as 1, 1 as `true`, and a number of seconds as an instant. The API
refuses such a value, because a client that sends one has a bug, and should learn of it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

#: An instant as in RFC 3339, section 5.6. A note in that section allows a space in place of the T.
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
#: The largest values of PostgreSQL's `smallint` and `integer`.
MAX_SMALLINT = 32_767
MAX_INTEGER = 2**31 - 1


def _check_number(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise ValueError("a number is expected")  # noqa: TRY004 - pydantic turns only a ValueError into an answer
    return value


def _check_flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false is expected")  # noqa: TRY004 - as above
    return value


def _check_instant(value: Any) -> Any:
    if isinstance(value, str) and not _RFC3339.fullmatch(value):
        raise ValueError("a time of RFC 3339 with its zone is expected, such as 2026-11-22T10:30:00Z")
    if isinstance(value, bool | int | float):
        raise ValueError("a time of RFC 3339 is expected, not a number")  # noqa: TRY004 - as above
    return value


#: Refuses a text or a flag in place of a number. Use it directly for a field that may also be null: `Annotated[int,
#: Field(ge=1), JsonNumber] | None`. Put JsonNumber last, because the OpenAPI document loses bounds that follow it.
JsonNumber = BeforeValidator(_check_number)
#: The types of fields: a whole number, a number, and true or false.
Integer: TypeAlias = Annotated[int, JsonNumber]
Number: TypeAlias = Annotated[float, JsonNumber]
Flag: TypeAlias = Annotated[bool, BeforeValidator(_check_flag)]
#: For a field with an instant: `Annotated[datetime, JsonInstant]`.
JsonInstant = BeforeValidator(_check_instant)

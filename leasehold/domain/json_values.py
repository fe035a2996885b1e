"""Values as JSON spells them: what a document's schema refuses is refused.

Pydantic takes `true` for 1, "1" for 1, 1 for `true`, and a number of seconds for a point in time. A client that sends
one of these means something else, or has a bug that nobody tells it of.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

#: RFC 3339, 5.6, with a space for the T as its note allows.
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
#: The ends of PostgreSQL's `smallint` and `integer`, above.
MOST_SMALLINT = 32_767
MOST_INTEGER = 2**31 - 1


def _number(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise ValueError("a number is expected")  # noqa: TRY004 - pydantic turns only a ValueError into an answer
    return value


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false is expected")  # noqa: TRY004 - as above
    return value


def _instant(value: Any) -> Any:
    if isinstance(value, str) and not _RFC3339.fullmatch(value):
        raise ValueError("a time of RFC 3339 with its zone is expected, such as 2026-11-22T10:30:00Z")
    if isinstance(value, bool | int | float):
        raise ValueError("a time of RFC 3339 is expected, not a number")  # noqa: TRY004 - as above
    return value


#: For `Annotated[int, Field(ge=1), JsonNumber]`, where a field may be null, too: bounds that stand after it do not get
#: into the document.
JsonNumber = BeforeValidator(_number)
Integer: TypeAlias = Annotated[int, JsonNumber]
Number: TypeAlias = Annotated[float, JsonNumber]
Flag: TypeAlias = Annotated[bool, BeforeValidator(_flag)]
JsonInstant = BeforeValidator(_instant)

"""Makes and follows JSON pointers (RFC 6901). A pointer such as `/items/0/price` names a value in a JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the child process that checks payloads loads no pydantic
    from pydantic import ValidationError

#: `pointer_to` cuts a pointer after this many characters, because a client may send an object whose keys have any
#: length.
_MAX_CHARACTERS = 300


def pointer_to(path: Iterable[object]) -> str:
    """The pointer for these keys and list positions, from the root of the document down. A long pointer is cut, so use
    it only in messages.
    """
    pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
    return pointer if len(pointer) <= _MAX_CHARACTERS else pointer[:_MAX_CHARACTERS] + "…"


def path_of(pointer: str) -> list[str]:
    """The keys and positions that the pointer names, from the root down. A position in a list is text, too: `0`."""
    return [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]


def value_at(document: Any, pointer: str) -> Any:
    """The value at the pointer. None: the document has no value there, or has null."""
    try:
        return find_value(document, pointer)
    except LookupError:
        return None


def find_value(document: Any, pointer: str) -> Any:
    """The value at the pointer. Raises LookupError if the document has no value there."""
    value = document
    for key in path_of(pointer):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise LookupError(pointer)
    return value


def first_mismatch_of(error: ValidationError) -> tuple[str, str]:
    """The pointer to the first value that pydantic refused, and the reason."""
    mismatch = error.errors(include_url=False)[0]
    return pointer_to(mismatch["loc"]), mismatch["msg"]

"""Computes the digest of a JSON value. Two kinds of keys contain such a digest in place of the value itself: the key of
a run's scope, and the key of a limit that counts the runs with the same value in the payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

#: The number of characters of each digest. A long value itself would make a key too long for an index.
LENGTH = 40
#: orjson writes and reads a whole number as an integer if it is at least _LEAST and less than _BEYOND.
_LEAST, _BEYOND = -(2**63), 2**64


def json_digest(value: Any) -> str:
    """The digest. Equal values have the same digest. The order of an object's keys and the spelling of a number make no
    difference.
    """
    encoded = orjson.dumps(_with_plain_numbers(value), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(encoded).hexdigest()[:LENGTH]


def _with_plain_numbers(value: Any) -> Any:
    """The value, with 7 in place of 7.0, because both are the same number. PostgreSQL itself changes the spelling: it
    returns 1e16 as 10000000000000000.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() and _LEAST <= value < _BEYOND else value
    if isinstance(value, Mapping):
        return {key: _with_plain_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_plain_numbers(one) for one in value]
    return value

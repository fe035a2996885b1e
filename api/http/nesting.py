"""What a JSON body may hold, looked at before any parser does: parsers recurse, and not all of them say so kindly.

The check is linear in the body. A body with few brackets and no long number costs three scans by C.
"""

from __future__ import annotations

import re
from array import array
from http import HTTPStatus
from itertools import accumulate

from leasehold.api.http.problems import Problem

#: A string; one that is never closed goes to the end, so that each byte is looked at once.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_NUMBER = re.compile(rb"(-?[0-9]{19,}+)(?![0-9.eE])")
_PART_OF_NUMBER = frozenset(b"0123456789.eE+-")
_OPENS, _CLOSES = b"[{", b"]}"
_NO_BRACKETS = bytes(set(range(256)) - set(_OPENS + _CLOSES))
_STEPS = bytes.maketrans(_OPENS + _CLOSES, b"\x01\x01\xff\xff")
#: What PostgreSQL's and everybody's 64-bit integers hold: above 2^63 an unsigned one does.
_LEAST, _MOST = -(2**63), 2**64 - 1
_MOST_DIGITS = 20


def refusal(body: bytes, most_depth: int) -> Problem | None:
    """Why the body is not even parsed: lists and objects deeper than `most_depth`, integers beyond 64 bits."""
    many = body.count(b"[") + body.count(b"{") > most_depth
    long = _LONG_NUMBER.search(body) is not None
    if not many and not long:
        return None
    bare = _STRING.sub(b'""', body)
    if many and _depth(bare) > most_depth:
        said = f"Lists and objects of a body are nested at most {most_depth} deep."
        return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "body_too_deep", said)
    if long and _has_huge_integer(bare):
        said = "The body has an integer beyond 64 bits."
        return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "integer_too_large", said)
    return None


def _depth(bare: bytes) -> int:
    steps = array("b", bare.translate(_STEPS, _NO_BRACKETS))
    return max(accumulate(steps), default=0)


def _has_huge_integer(bare: bytes) -> bool:
    for found in _NUMBER.finditer(bare):
        if found.start() and bare[found.start() - 1] in _PART_OF_NUMBER:
            continue  # the digits of a fraction or an exponent
        if len(found[1].lstrip(b"-")) > _MOST_DIGITS or not _LEAST <= int(found[1]) <= _MOST:
            return True
    return False

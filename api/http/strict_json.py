"""Refuses bodies that are not strict JSON, before any parser reads them.

Parsers recurse, so a deep body could crash the process. Python's parser also accepts texts that no other part of the
platform can store: `NaN`, a number beyond a double, half of a surrogate pair, and UTF-16. Without this check such a
value would be stored as null, or end in an error 500.

The check takes time linear in the body's length. A usual body costs four scans in C.
"""

from __future__ import annotations

import re
from array import array
from http import HTTPStatus
from itertools import accumulate

import orjson

from leasehold.api.http.problems import Problem

#: A string. A string that is never closed extends to the end, so that each byte is scanned once.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_NUMBER = re.compile(rb"(-?[0-9]{19,}+)(?![0-9.eE])")
_PART_OF_NUMBER = frozenset(b"0123456789.eE+-")
_OPENS, _CLOSES = b"[{", b"]}"
_NO_BRACKETS = bytes(set(range(256)) - set(_OPENS + _CLOSES))
_STEPS = bytes.maketrans(_OPENS + _CLOSES, b"\x01\x01\xff\xff")
#: The range of 64-bit integers, signed and unsigned together.
_MIN, _MAX = -(2**63), 2**64 - 1
_MAX_DIGITS = 20
#: A body with a value that is not strict JSON contains one of these: a name such as NaN, an escaped surrogate, a large
#: exponent, many digits, or the NUL bytes of UTF-16. Few other bodies do, and those are parsed to find out.
_DOUBTFUL = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]|[eE]\+?[0-9]{3}|[0-9]{300}|\x00")


def refusal(body: bytes, max_depth: int) -> Problem | None:
    """The problem of a body that is not strict JSON, has lists and objects deeper than `max_depth`, or integers beyond
    64 bits. None: a parser may read the body, and refuses what else is wrong with it.
    """
    return _too_deep_or_large(body, max_depth) or _not_strict(body)


def _not_strict(body: bytes) -> Problem | None:
    if _DOUBTFUL.search(body) is None:
        return None
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        message = "The body is not strict JSON: it must be UTF-8, with finite numbers and whole surrogate pairs."
        return Problem(HTTPStatus.BAD_REQUEST, "malformed_json", message)
    return None


def _too_deep_or_large(body: bytes, max_depth: int) -> Problem | None:
    may_be_deep = body.count(b"[") + body.count(b"{") > max_depth
    has_long_number = _LONG_NUMBER.search(body) is not None
    if not may_be_deep and not has_long_number:
        return None
    bare = _STRING.sub(b'""', body)
    if may_be_deep and _depth(bare) > max_depth:
        message = f"Lists and objects in a body can be nested at most {max_depth} deep."
        return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "body_too_deep", message)
    if has_long_number and _has_huge_integer(bare):
        message = "The body has an integer beyond 64 bits."
        return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "integer_too_large", message)
    return None


def _depth(bare: bytes) -> int:
    """The depth of the brackets: each opening one counts 1, each closing one -1, and the largest sum is the depth."""
    steps = array("b", bare.translate(_STEPS, _NO_BRACKETS))
    return max(accumulate(steps), default=0)


def _has_huge_integer(bare: bytes) -> bool:
    for match in _NUMBER.finditer(bare):
        if match.start() and bare[match.start() - 1] in _PART_OF_NUMBER:
            continue  # the digits of a fraction or an exponent
        if len(match[1].lstrip(b"-")) > _MAX_DIGITS or not _MIN <= int(match[1]) <= _MAX:
            return True
    return False

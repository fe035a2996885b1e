"""Refuses bodies that are not strict JSON, before any parser reads them.

A parser calls itself for each level of nesting, so a deep body could crash the process. Python's parser also accepts
texts that the platform cannot store: `NaN`, a number beyond a double, half of a surrogate pair, and UTF-16. Without
this check, such a value would be stored as null or cause an error 500.

The time of the check grows linearly with the body's length. A usual body costs four scans by C code.
"""

from __future__ import annotations

import re
from array import array
from http import HTTPStatus
from itertools import accumulate

import orjson

from leasehold.api.http.problems import Problem

#: A string in JSON. A string without a closing quote extends to the end of the body, so that each byte is scanned once.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
#: 19 digits in a row. An integer with fewer digits fits into 64 bits.
_LONG_DIGITS = re.compile(rb"[0-9]{19}")
#: A long integer, with its minus sign. Digits beside a point, an `e` or the sign of an exponent are no integer. A match
#: never begins after a digit. Otherwise the search would begin again at each digit of a number.
_LONG_INTEGER = re.compile(rb"(?<![0-9.eE+-])-?[0-9]{19,}+(?![.eE])")
#: The brackets of lists and objects.
_OPENS, _CLOSES = b"[{", b"]}"
#: All bytes except the brackets. `_depth` deletes them.
_NO_BRACKETS = bytes(set(range(256)) - set(_OPENS + _CLOSES))
#: Turns an opening bracket into the byte 1, and a closing bracket into the byte -1.
_STEPS = bytes.maketrans(_OPENS + _CLOSES, b"\x01\x01\xff\xff")
#: The range of 64-bit integers, signed and unsigned together.
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
#: An integer with more digits is certainly beyond 64 bits. The check does not convert such an integer to an `int`,
#: because the conversion takes quadratic time.
_MAX_DIGITS = 20
#: If Python's parser accepts a body that is not strict JSON, the body contains one of these: a name such as NaN, a
#: surrogate (escaped, or as bytes), an exponent of three digits, 200 digits, or the NUL bytes of UTF-16. (A number
#: beyond a double has an exponent of three digits, or more than 200 digits.) A strict body may also contain one of
#: these. Only a strict parser can decide, so orjson parses each body that contains one.
_MAYBE_NOT_STRICT = re.compile(
    rb"NaN|Infinity|\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|[eE]\+?[0-9]{3}|(?<![0-9])[0-9]{200}|\x00"
)


def refusal(body: bytes, max_depth: int) -> Problem | None:
    """The problem of a body that is not strict JSON, is nested deeper than `max_depth`, or has an integer beyond 64
    bits. Returns None if a parser may read the body. The parser itself refuses a body with any other error.
    """
    return _problem_of_size(body, max_depth) or _problem_of_syntax(body)


def _problem_of_syntax(body: bytes) -> Problem | None:
    if _MAYBE_NOT_STRICT.search(body) is None:
        return None
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        message = "The body is not strict JSON: it must be UTF-8, with finite numbers and whole surrogate pairs."
        return Problem(HTTPStatus.BAD_REQUEST, "malformed_json", message)
    return None


def _problem_of_size(body: bytes, max_depth: int) -> Problem | None:
    """The problem of a body that is nested too deep, or has an integer that is too large."""
    may_be_deep = body.count(b"[") + body.count(b"{") > max_depth
    has_long_number = _LONG_DIGITS.search(body) is not None
    if not may_be_deep and not has_long_number:
        return None
    # Brackets and digits inside strings do not count.
    without_strings = _STRING.sub(b'""', body)
    if may_be_deep and _depth(without_strings) > max_depth:
        message = f"Lists and objects in a body can be nested at most {max_depth} deep."
        return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "body_too_deep", message)
    if has_long_number and _has_huge_integer(without_strings):
        message = "The body has an integer beyond 64 bits."
        return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "integer_too_large", message)
    return None


def _depth(without_strings: bytes) -> int:
    """The depth of the nesting. An opening bracket counts 1, a closing bracket -1, and the largest sum is the depth."""
    steps = array("b", without_strings.translate(_STEPS, _NO_BRACKETS))
    return max(accumulate(steps), default=0)


def _has_huge_integer(without_strings: bytes) -> bool:
    return any(
        len(match[0].lstrip(b"-")) > _MAX_DIGITS or not _MIN_INTEGER <= int(match[0]) <= _MAX_INTEGER
        for match in _LONG_INTEGER.finditer(without_strings)
    )

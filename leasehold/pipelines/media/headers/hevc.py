"""HEVC: the area that a coded picture says it has, which a decoder allocates whatever its container says."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from leasehold.pipelines.media.refusals import corrupt_image

Size = tuple[int, int]

MAX_UNITS = 20_000  # units of one picture: slices and parameter sets
_LENGTH_SIZE_AT, _ARRAYS_AT = 21, 22  # of an hvcC box: how long a unit's length is, and how many arrays of units follow
_SEQUENCE_PARAMETERS = 33
_FIRST_OTHER = 32  # kinds of units below are slices
_PROFILE_BITS, _LEVEL_BITS = 88, 8
_WITH_PLANES = 3  # 4:4:4, which may code its planes apart
_LONGEST_NUMBER = 32  # bits
_LONGEST_HEAD = 512  # bytes in which the size stands: its sub-layers take 80 at most


def configured(data: bytes, start: int, end: int) -> tuple[int, list[Size]]:
    """Of an hvcC box: how many bytes a unit's length has, and the sizes that its parameter sets name."""
    content = data[start:end]
    at, sizes = _ARRAYS_AT + 1, []
    for _ in range(content[_ARRAYS_AT]):
        (units,) = struct.unpack_from(">H", content, at + 1)
        at += 3
        for _ in range(units):
            (length,) = struct.unpack_from(">H", content, at)
            sizes += _sizes(content[at + 2 : at + 2 + length])
            at += 2 + length
    if at > len(content):
        raise corrupt_image("it ends in the middle of its parameters")
    return (content[_LENGTH_SIZE_AT] & 3) + 1, sizes


def coded(data: bytes, length_size: int) -> list[Size]:
    """The sizes that one coded picture's own parameter sets name; a decoder takes these, too.

    Raises Permanent: corrupt_image, also where there are several pictures: each would cost its area for a few bytes.
    """
    pictures, sizes = 0, []
    for unit in _units(data, length_size):
        if _is_base_layer(unit) and _kind(unit) < _FIRST_OTHER:
            pictures += unit[2] >> 7  # of the slices of a picture the first one says so
        sizes += _sizes(unit)
    if pictures > 1:
        raise corrupt_image("it has several pictures where one belongs")
    return sizes


def _units(data: bytes, length_size: int) -> Iterator[bytes]:
    at = 0
    for _ in range(MAX_UNITS):
        if at == len(data):
            return
        length = int.from_bytes(data[at : at + length_size], "big")
        at += length_size + length
        if at > len(data) or length < 3:  # noqa: PLR2004 - its kind has two bytes, and what it is of at least one
            raise corrupt_image("it ends in the middle of its pixels")
        yield data[at - length : at]
    raise corrupt_image("it is cut into too many pieces")


def _kind(unit: bytes) -> int:
    return unit[0] >> 1 & 0x3F


def _is_base_layer(unit: bytes) -> bool:
    """Further layers (the other eye of a spatial photo) are not decoded."""
    return not unit[0] & 1 and not unit[1] >> 3


def _sizes(unit: bytes) -> list[Size]:
    if len(unit) < 3 or _kind(unit) != _SEQUENCE_PARAMETERS or not _is_base_layer(unit):  # noqa: PLR2004 - see _units
        return []
    # A third byte after two zeroes only keeps the pattern of a start apart.
    bits = _Bits(unit[2:_LONGEST_HEAD].replace(b"\0\0\3", b"\0\0"))
    bits.take(4)
    sub_layers = bits.take(3)
    bits.take(1 + _PROFILE_BITS + _LEVEL_BITS)
    said = [(bits.take(1), bits.take(1)) for _ in range(sub_layers)]
    if sub_layers:
        bits.take(2 * (8 - sub_layers))
    for profile, level in said:
        bits.take(profile * _PROFILE_BITS + level * _LEVEL_BITS)
    bits.number()
    if bits.number() == _WITH_PLANES:
        bits.take(1)
    return [(bits.number(), bits.number())]


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
        self._at = 0

    def take(self, count: int) -> int:
        taken = self._bits[self._at : self._at + count]
        if len(taken) < count:
            raise corrupt_image("it ends in the middle of its parameters")
        self._at += count
        return int(taken, 2) if taken else 0

    def number(self) -> int:
        """An Exp-Golomb code."""
        zeroes = self._bits.find("1", self._at) - self._at
        if not 0 <= zeroes <= _LONGEST_NUMBER:
            raise corrupt_image("its parameters are nonsense")
        self._at += zeroes
        return self.take(zeroes + 1) - 1

"""Reads the size of a coded HEVC picture from its parameter sets, for the HEIC reader. A decoder allocates memory by
this size, not by the size in the container.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from leasehold.pipelines.media.headers.bits import Bits
from leasehold.pipelines.media.refusals import corrupt_image

Size = tuple[int, int]  # width and height in pixels

MAX_UNITS = 20_000  # the most units (slices and parameter sets) of one picture
# An hvcC box has the configuration of the decoder. These are the positions of two of its bytes. The first byte says how
# many bytes the length of a unit has, and the second is the number of arrays of units.
_LENGTH_SIZE_AT, _ARRAYS_AT = 21, 22
_SEQUENCE_PARAMETERS = 33  # the kind of the units that have the size of pictures
_FIRST_NON_SLICE = 32  # units whose kind is a lower number are slices (parts of a picture)
_PROFILE_BITS, _LEVEL_BITS = 88, 8  # the bits of a profile and of a level, which this reader skips
_CHROMA_444 = 3  # the format 4:4:4 has one more bit, which says whether its planes are coded separately
_MAX_HEAD_BYTES = 512  # the picture's size is within these bytes, because the sub-layers before it take at most 80


def parameter_sizes(data: bytes, start: int, end: int) -> tuple[int, list[Size]]:
    """Read an hvcC box. Returns the number of bytes of a unit's length, and the sizes in the box's parameter sets.

    The box has arrays of units. Each array begins with 3 bytes, which are the kind of its units (1 byte) and their
    number. Each unit begins with its length in 2 bytes.
    """
    content = data[start:end]
    position, sizes = _ARRAYS_AT + 1, []
    for _ in range(content[_ARRAYS_AT]):
        (units,) = struct.unpack_from(">H", content, position + 1)
        position += 3
        for _ in range(units):
            (length,) = struct.unpack_from(">H", content, position)
            sizes += _sizes_in(content[position + 2 : position + 2 + length])
            position += 2 + length
    if position > len(content):
        raise corrupt_image("the file ends in the middle of its parameters")
    return (content[_LENGTH_SIZE_AT] & 3) + 1, sizes


def coded_sizes(data: bytes, length_size: int) -> list[Size]:
    """The sizes in the parameter sets inside a coded picture. A decoder uses not only the sizes in the hvcC box, but
    also these.

    Raises Permanent `corrupt_image`, also if `data` has several pictures. The reason: each picture may have few bytes,
    but a decoder needs the time for its whole area.
    """
    pictures, sizes = 0, []
    for unit in _units(data, length_size):
        if _is_base_layer(unit) and _kind(unit) < _FIRST_NON_SLICE:
            pictures += unit[2] >> 7  # this bit is 1 only in the first slice of a picture
        sizes += _sizes_in(unit)
    if pictures > 1:
        raise corrupt_image("an item has several coded pictures")
    return sizes


def _units(data: bytes, length_size: int) -> Iterator[bytes]:
    position = 0
    for _ in range(MAX_UNITS):
        if position == len(data):
            return
        length = int.from_bytes(data[position : position + length_size], "big")
        position += length_size + length
        if position > len(data) or length < 3:  # noqa: PLR2004 - a head of two bytes, and at least one byte of content
            raise corrupt_image("the file ends in the middle of its pixels")
        yield data[position - length : position]
    raise corrupt_image("an item has too many units")


def _kind(unit: bytes) -> int:
    return unit[0] >> 1 & 0x3F


def _is_base_layer(unit: bytes) -> bool:
    """Whether a decoder reads the unit. A decoder ignores units whose layer id (6 bits) is not 0, such as the picture
    for the second eye in a spatial photo.
    """
    return not unit[0] & 1 and not unit[1] >> 3


def _sizes_in(unit: bytes) -> list[Size]:
    """If the unit is a sequence parameter set, a list with the size in it. For any other unit, an empty list."""
    if len(unit) < 3 or _kind(unit) != _SEQUENCE_PARAMETERS or not _is_base_layer(unit):  # noqa: PLR2004 - see _units
        return []
    # Remove each byte 3 that follows two zeroes. It is not content. The encoder adds it, so that the content never
    # looks like the start of a unit.
    bits = Bits(unit[2:_MAX_HEAD_BYTES].replace(b"\0\0\3", b"\0\0"))
    bits.unsigned(4)  # id of the video parameter set
    sub_layers = bits.unsigned(3)
    bits.unsigned(1 + _PROFILE_BITS + _LEVEL_BITS)  # temporal nesting, and the profile and level of all layers
    has_profile_and_level = [(bits.unsigned(1), bits.unsigned(1)) for _ in range(sub_layers)]
    if sub_layers:
        bits.unsigned(2 * (8 - sub_layers))  # alignment: two bits for each sub-layer that does not exist
    for has_profile, has_level in has_profile_and_level:
        bits.unsigned(has_profile * _PROFILE_BITS + has_level * _LEVEL_BITS)
    bits.exp_golomb()  # id of this parameter set
    chroma_format = bits.exp_golomb()
    if chroma_format == _CHROMA_444:
        bits.unsigned(1)
    width, height = bits.exp_golomb(), bits.exp_golomb()
    return [(width, height)]

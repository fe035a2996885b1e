"""Reads the header of a TIFF file: the size of its first page, which is the picture. Further pages are not read.

Before a decoder reads the file, this module refuses codecs whose decoders have had many faults (JPEG from before 1995,
and codecs of vendors). It also refuses a directory whose entries name more bytes than the file has, because a decoder
would copy the bytes of each entry. 64-bit files (BigTIFF) never reach this module, because `sniff` does not accept
them.
"""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image, unsupported_format

# The tags (numbers) of the fields that this module reads. A directory has an entry for each field of a page.
_WIDTH, _HEIGHT, _COMPRESSION, _ORIENTATION, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 259, 274, 322, 323
_TAGS = {_WIDTH, _HEIGHT, _COMPRESSION, _ORIENTATION, _TILE_WIDTH, _TILE_HEIGHT}
#: The accepted codecs: uncompressed (1), fax (2, 3, 4), LZW (5), JPEG (7), Deflate (8 and its old number 32946),
#: PackBits (32773).
_CODECS = {1, 2, 3, 4, 5, 7, 8, 32946, 32773}
#: The number of a field's type -> bytes of one value.
_BYTES_BY_TYPE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_SHORT, _LONG = 3, 4
_INLINE_BYTES = 4  # an entry itself contains a value of at most this size
_SIDES_SWAPPED = range(5, 9)  # orientations that swap width and height, because the decoder turns the picture


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image` or `unsupported_format`, or struct.error if the file ends too
    early.
    """
    byte_order = "<" if data[:2] == b"II" else ">"
    entries = _entries(data, byte_order)
    width, height = entries.get(_WIDTH, 0), entries.get(_HEIGHT, 0)
    codec = entries.get(_COMPRESSION, 1)
    if codec not in _CODECS:
        raise unsupported_format(f"TIFF of compression {codec} is not accepted")
    # A decoder decodes whole tiles, even if the picture is smaller.
    max_width, max_height = max(width, entries.get(_TILE_WIDTH, 0)), max(height, entries.get(_TILE_HEIGHT, 0))
    if width == 0 or height == 0:
        return Header(0, 0)  # even if there are tiles, because the caller refuses a picture without area
    is_turned = entries.get(_ORIENTATION, 1) in _SIDES_SWAPPED
    return Header(max_height, max_width) if is_turned else Header(max_width, max_height)


def _entries(data: bytes, byte_order: str) -> dict[int, int]:
    """The fields of the file's first directory, if they are in _TAGS: tag -> value."""
    (directory,) = struct.unpack_from(f"{byte_order}I", data, 4)
    (count,) = struct.unpack_from(f"{byte_order}H", data, directory)
    values: dict[int, int] = {}
    total_bytes = 0
    for position in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, field_type, values_count = struct.unpack_from(f"{byte_order}HHI", data, position)
        size = values_count * _BYTES_BY_TYPE.get(field_type, 1)
        total_bytes += size if size > _INLINE_BYTES else 0
        if tag in _TAGS:
            if field_type not in (_SHORT, _LONG) or values_count != 1 or tag in values:
                raise corrupt_image("the header contradicts itself")
            value_format = "H" if field_type == _SHORT else "I"
            (values[tag],) = struct.unpack_from(byte_order + value_format, data, position + 8)
    if total_bytes > len(data):
        raise corrupt_image("the header names more bytes than the file has")
    return values

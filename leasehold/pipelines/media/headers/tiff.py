"""TIFF: the area of its first page, which is the picture; the pages, thumbnails and folders after it are not read.

Refused before a decoder sees them: codecs with a long list of faults (JPEG of before 1995, vendors' own), 64-bit files,
and folders whose entries together name more bytes than the file has, which a reader would copy entry by entry.
"""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image, unsupported_format

_WIDTH, _HEIGHT, _COMPRESSION, _ORIENTATION, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 259, 274, 322, 323
_ASKED = {_WIDTH, _HEIGHT, _COMPRESSION, _ORIENTATION, _TILE_WIDTH, _TILE_HEIGHT}
#: None, fax (2, 3, 4), LZW, JPEG, Deflate (8 and the old number), PackBits.
_CODECS = {1, 2, 3, 4, 5, 7, 8, 32946, 32773}
_BYTES_OF = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_SHORT, _LONG = 3, 4
_INLINE = 4  # bytes that an entry holds itself
_TURNED = range(5, 9)  # orientations that swap the sides; the decoder does so itself


def read(data: bytes) -> Header:
    """Raises Permanent: corrupt_image, unsupported_format; struct.error where it ends too early."""
    order = "<" if data[:2] == b"II" else ">"
    found = _entries(data, order)
    width, height = found.get(_WIDTH, 0), found.get(_HEIGHT, 0)
    codec = found.get(_COMPRESSION, 1)
    if codec not in _CODECS:
        raise unsupported_format(f"TIFF of compression {codec} is not")
    # A tile is decoded whole, however small the picture is.
    widest, highest = max(width, found.get(_TILE_WIDTH, 0)), max(height, found.get(_TILE_HEIGHT, 0))
    if width == 0 or height == 0:
        return Header(0, 0)
    turned = found.get(_ORIENTATION, 1) in _TURNED
    return Header(highest, widest) if turned else Header(widest, highest)


def _entries(data: bytes, order: str) -> dict[int, int]:
    """What the first folder says of the tags that are asked for; the first one of a tag counts."""
    (at,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, at)
    found: dict[int, int] = {}
    named = 0
    for place in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, items = struct.unpack_from(f"{order}HHI", data, place)
        size = items * _BYTES_OF.get(kind, 1)
        named += size if size > _INLINE else 0
        if tag in _ASKED:
            if kind not in (_SHORT, _LONG) or items != 1 or tag in found:
                raise corrupt_image("its header contradicts itself")
            (found[tag],) = struct.unpack_from(f"{order}{'H' if kind == _SHORT else 'I'}", data, place + 8)
    if named > len(data):
        raise corrupt_image("its header names more bytes than it has")
    return found

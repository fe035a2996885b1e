"""Reads the width and the height of a picture from the header of a BMP file. BMP has several forms of headers."""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

_CORE = 12  # bytes of the oldest header; all other headers begin with the same fields


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image`, or struct.error if the file ends too early."""
    (size,) = struct.unpack_from("<I", data, 14)  # the size of the header, in bytes
    if size == _CORE:
        width, height = struct.unpack_from("<HH", data, 18)
        return Header(width, height)
    width, height = struct.unpack_from("<ii", data, 18)
    if width < 0:
        raise corrupt_image("the width is negative")
    return Header(width, abs(height))  # a negative height means that the rows go from the top down

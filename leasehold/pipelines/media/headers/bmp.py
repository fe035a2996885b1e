"""BMP: the area, from whichever of its headers it has."""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

_CORE = 12  # bytes of the oldest header; all others begin alike


def read(data: bytes) -> Header:
    """Raises Permanent: corrupt_image; struct.error where it ends too early."""
    (size,) = struct.unpack_from("<I", data, 14)
    if size == _CORE:
        width, height = struct.unpack_from("<HH", data, 18)
        return Header(width, height)
    width, height = struct.unpack_from("<ii", data, 18)
    if width < 0:
        raise corrupt_image("its width is negative")
    return Header(width, abs(height))  # from the top down, if it is negative

"""Reads the boxes of ISO base media files, the format of HEIC and AVIF pictures. A box has a kind and a content. The
content may be further boxes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from leasehold.pipelines.media.refusals import corrupt_image

#: The kind of a box, and the positions in the file at which its content starts and ends.
Box = tuple[bytes, int, int]


def boxes(data: bytes, start: int, end: int) -> Iterator[Box]:
    """The boxes of `data[start:end]`, without the boxes inside them. Raises `corrupt_image` or struct.error."""
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, start)
        body = start + 8
        if size == 1:  # the size is in 64 bits after the kind
            (size,) = struct.unpack_from(">Q", data, body)
            body += 8
        stop = start + size if size else end  # size 0: the box goes on to the end of the range
        if stop < body or stop > end:
            raise corrupt_image("the file ends in the middle of a box")
        yield kind, body, stop
        start = stop

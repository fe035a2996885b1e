"""GIF: the area that all frames together cover, and their number."""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

FEW_BLOCKS = 100_000  # never too many
LEAST_BYTES = 64  # a block, on average, beyond that; encoders write 255

_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, 0x3B


def read(data: bytes) -> Header:
    """Walk the file. Raises Permanent: corrupt_image; struct.error or IndexError where it ends too early."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _table_bytes(flags)
    frames, blocks, at_most = 0, 0, max(FEW_BLOCKS, len(data) // LEAST_BYTES)
    while position < len(data):
        kind = data[position]
        if kind == _TRAILER:
            break
        if kind == _EXTENSION:
            position, passed = _skip_blocks(data, position + 2, at_most)
        elif kind == _IMAGE:
            left, top, wide, high, flags = struct.unpack_from("<HHHHB", data, position + 1)
            # A frame may reach beyond the canvas, and the decoder then enlarges the canvas.
            width, height = max(width, left + wide), max(height, top + high)
            frames += 1
            position, passed = _skip_blocks(data, position + 11 + _table_bytes(flags), at_most)
        else:
            position, passed = position + 1, 0  # a stray byte, which decoders pass over
        blocks += passed + 1
        if blocks > at_most:
            raise corrupt_image("it is cut into too many blocks")
    if not frames:
        raise corrupt_image("it holds no frame")
    return Header(width, height, frames)


def _table_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_blocks(data: bytes, position: int, at_most: int) -> tuple[int, int]:
    """Behind the empty block that ends a chain, and how many others were passed.

    Raises IndexError where the file ends first.
    """
    passed = 0
    while size := data[position]:
        position += size + 1
        passed += 1
        if passed > at_most:
            break
    return position + 1, passed

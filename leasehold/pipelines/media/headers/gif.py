"""Reads the header of a GIF file: the area that all frames together cover, and the number of frames."""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

FEW_BLOCKS = 100_000  # a file may always have so many blocks
MIN_BLOCK_BYTES = 64  # the smallest average size of a block if there are more blocks; encoders write 255

_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, 0x3B


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image`; struct.error or IndexError if the file ends too early."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _table_bytes(flags)
    frames, blocks, max_blocks = 0, 0, max(FEW_BLOCKS, len(data) // MIN_BLOCK_BYTES)
    while position < len(data):
        kind = data[position]
        if kind == _TRAILER:
            break
        if kind == _EXTENSION:
            position, skipped = _skip_blocks(data, position + 2, max_blocks)
        elif kind == _IMAGE:
            left, top, frame_width, frame_height, flags = struct.unpack_from("<HHHHB", data, position + 1)
            # If a frame reaches beyond the canvas, the decoder enlarges the canvas.
            width, height = max(width, left + frame_width), max(height, top + frame_height)
            frames += 1
            position, skipped = _skip_blocks(data, position + 11 + _table_bytes(flags), max_blocks)
        else:
            position, skipped = position + 1, 0  # a stray byte, which decoders skip
        blocks += skipped + 1
        if blocks > max_blocks:
            raise corrupt_image("the file has too many blocks")
    if not frames:
        raise corrupt_image("the file has no frame")
    return Header(width, height, frames)


def _table_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_blocks(data: bytes, position: int, max_blocks: int) -> tuple[int, int]:
    """Skip a chain of blocks. Returns the position behind the empty block that ends the chain, and the number of the
    other blocks. Raises IndexError if the file ends first.
    """
    skipped = 0
    while size := data[position]:
        position += size + 1
        skipped += 1
        if skipped > max_blocks:
            break
    return position + 1, skipped

"""Reads the header of a GIF file: the declared canvas, enlarged if a frame exceeds it, and the number of frames."""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

#: A file may always have this many blocks. A file with more blocks is refused if it has more than one block for each
#: MIN_BLOCK_BYTES bytes.
BLOCKS_ALWAYS_ALLOWED = 100_000
MIN_BLOCK_BYTES = 64  # encoders write blocks of 255 bytes

_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, 0x3B  # the first byte of each part of the file
_COMMENT, _APPLICATION = 0xFE, 0xFF  # labels of extensions
_LOOP = b"NETSCAPE2.0"  # the name of the extension with the loop count


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image`; struct.error or IndexError if the file ends too early."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + _table_bytes(flags)
    frames, blocks, max_blocks = 0, 0, max(BLOCKS_ALWAYS_ALLOWED, len(data) // MIN_BLOCK_BYTES)
    while position < len(data):
        kind = data[position]
        if kind == _TRAILER:
            break
        if kind == _EXTENSION:
            position, skipped = _skip_extension(data, position + 1, max_blocks, is_before_first_frame=not frames)
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
    """The size of the colour table that follows these flags."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_extension(data: bytes, position: int, max_blocks: int, *, is_before_first_frame: bool) -> tuple[int, int]:
    """Skip an extension exactly as the decoder (Pillow) does. Otherwise a file could hide frames from this reader.

    By the standard, an extension ends at its first empty block. But Pillow reads one block, which may be empty, and
    then a chain, which is all blocks up to and including the next empty block. There are two exceptions. For a comment,
    Pillow reads only a chain. For an extension with the loop count before the first frame, Pillow reads two blocks
    before the chain.

    Returns the position after the extension, and the number of its blocks.
    """
    label, start = data[position], position + 1
    position, skipped = start, 0
    if label != _COMMENT:
        position += data[start] + 1
        is_loop = label == _APPLICATION and is_before_first_frame and data[start + 1 : position].startswith(_LOOP)
        if is_loop:
            position += data[position] + 1
        skipped = 1 + is_loop
    end, chain_blocks = _skip_blocks(data, position, max_blocks)
    return end, skipped + chain_blocks


def _skip_blocks(data: bytes, position: int, max_blocks: int) -> tuple[int, int]:
    """Skip a chain of blocks, which ends at an empty block. Returns the position after the empty block, and how many
    blocks came before the empty block. Raises IndexError if the file ends before an empty block.
    """
    skipped = 0
    while size := data[position]:
        position += size + 1
        skipped += 1
        if skipped > max_blocks:
            break  # `read` then refuses the file
    return position + 1, skipped

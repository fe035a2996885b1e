"""Reads the header of a WebP file: the largest size in it (of the canvas, a bitstream or a frame), and the number of
frames.
"""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

#: A file with more chunks is refused, so that a header is read in a bounded number of steps.
MAX_CHUNKS = 100_000


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image`, or struct.error if the data of the last chunk is too short."""
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise corrupt_image("the file ends early")
    width, height, frames, chunks, position = 0, 0, 0, 0, 12
    while position + 8 <= end:
        kind, length = struct.unpack_from("<4sI", data, position)
        body = position + 8
        chunks += 1
        if body + length > end:
            raise corrupt_image("the file ends in the middle of a chunk")
        if chunks > MAX_CHUNKS:
            raise corrupt_image("the file has too many chunks")
        chunk_width, chunk_height = _size(kind, data, body)
        width, height = max(width, chunk_width), max(height, chunk_height)
        frames += kind == b"ANMF"  # each frame has one such chunk
        position = body + length + (length & 1)  # chunks are padded to an even length
    return Header(width, height, max(frames, 1))


def _size(kind: bytes, data: bytes, body: int) -> tuple[int, int]:
    """The size that a chunk declares: of the canvas, of a bitstream, or of a frame plus the frame's offset. A chunk
    that declares no size gives (0, 0).
    """
    if kind == b"VP8X":
        return _uint24(data, body + 4) + 1, _uint24(data, body + 7) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, body + 6)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, body + 1)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"ANMF":
        left, top = 2 * _uint24(data, body), 2 * _uint24(data, body + 3)
        return left + _uint24(data, body + 6) + 1, top + _uint24(data, body + 9) + 1
    return 0, 0


def _uint24(data: bytes, position: int) -> int:
    low, high = struct.unpack_from("<HB", data, position)
    return int(low + (high << 16))

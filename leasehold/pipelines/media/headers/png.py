"""PNG and APNG: size and number of frames."""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

MAX_CHUNKS = 100_000  # 32 MiB in the 8 KiB chunks that encoders write are 4096


def read(data: bytes) -> Header:
    """Walk the file. Raises Permanent: corrupt_image; struct.error or IndexError where it ends too early."""
    if data[8:16] != b"\x00\x00\x00\x0dIHDR":
        raise corrupt_image("it does not start with its header")
    width, height = struct.unpack_from(">II", data, 16)
    position, declared, found, chunks = 8, 1, 0, 0
    while position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        chunks += 1
        if end > len(data):
            raise corrupt_image("it ends in the middle of a chunk")
        if chunks > MAX_CHUNKS:
            raise corrupt_image("it is cut into too many chunks")
        if kind == b"IEND":
            break
        if kind == b"acTL":
            declared = max(declared, *struct.unpack_from(">I", data, position + 8))
        elif kind == b"fcTL":
            found += 1
        position = end
    # A default picture outside the animation is one more, and the decoder counts it.
    return Header(width, height, max(declared, found))

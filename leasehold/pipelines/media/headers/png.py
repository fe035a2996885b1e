"""Reads the header of a PNG or APNG file: its size and its number of frames."""

from __future__ import annotations

import struct

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

MAX_CHUNKS = 100_000  # far more than real files have: encoders write chunks of 8 KiB, so 32 MiB are 4096 chunks

_FIRST_CHUNK = 8  # the position of the first chunk: after the signature


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image`, or struct.error if the file ends too early."""
    if data[8:16] != b"\x00\x00\x00\x0dIHDR":
        raise corrupt_image("the file does not start with its header")
    width, height = struct.unpack_from(">II", data, 16)
    position, declared_frames, frame_chunks, chunks = _FIRST_CHUNK, 1, 0, 0
    while position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        chunks += 1
        if end > len(data):
            raise corrupt_image("the file ends in the middle of a chunk")
        if chunks > MAX_CHUNKS:
            raise corrupt_image("the file has too many chunks")
        if kind == b"IEND":
            break
        if kind == b"IHDR" and position > _FIRST_CHUNK:
            raise corrupt_image("the file has two headers")  # the decoder would use the last one
        if kind == b"acTL":  # this chunk declares the number of frames
            declared_frames = max(declared_frames, *struct.unpack_from(">I", data, position + 8))
        elif kind == b"fcTL":  # each frame has one such chunk
            frame_chunks += 1
        position = end
    # A file may declare more frames than it has, or fewer. The larger number counts, so that the limits hold in both
    # cases.
    return Header(width, height, max(declared_frames, frame_chunks))

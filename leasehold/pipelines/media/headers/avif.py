"""Reads the header of an AVIF file: the size of its largest item or track, and the number of samples of a sequence."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from leasehold.pipelines.media.headers.boxes import Box, boxes
from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image

MAX_BOXES = 20_000
MAX_DEPTH = 8

#: Boxes that contain boxes, and how many bytes of their own come before those.
_CONTAINERS = {
    b"meta": 4,
    b"iprp": 0,
    b"ipco": 0,
    b"moov": 0,
    b"trak": 0,
    b"mdia": 0,
    b"minf": 0,
    b"stbl": 0,
    b"stsd": 8,
}


def read(data: bytes) -> Header:
    """Read the header. Raises Permanent `corrupt_image`; struct.error or IndexError if the file ends too early."""
    width, height, frames = 0, 0, 1
    for number, (kind, start, end) in enumerate(_boxes(data, 0, len(data), 0)):
        if number > MAX_BOXES:
            raise corrupt_image("the file has too many boxes")
        if kind == b"ispe":
            box_width, box_height = struct.unpack_from(">II", data, start + 4)
        elif kind == b"av01":
            box_width, box_height = struct.unpack_from(">HH", data, start + 24)
        elif kind == b"stsz":
            frames = max(frames, *struct.unpack_from(">I", data, start + 8))
            continue
        else:
            continue
        if start >= end:
            raise corrupt_image("a size in the file is empty")
        width, height = max(width, box_width), max(height, box_height)
    return Header(width, height, frames)


def _boxes(data: bytes, start: int, end: int, depth: int) -> Iterator[Box]:
    """Every box in the range, and every box inside those: kind, start and end of its content."""
    if depth > MAX_DEPTH:
        raise corrupt_image("the boxes of the file are nested too deeply")
    for kind, body, stop in boxes(data, start, end):
        yield kind, body, stop
        if kind in _CONTAINERS:
            yield from _boxes(data, body + _CONTAINERS[kind], stop, depth + 1)

"""JPEG: size, number of scans, and the coding processes that our decoder knows."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image, too_many_scans, unsupported_format

MAX_SCANS = 64  # encoders write about ten; each one costs a pass over all coefficients
MAX_SEGMENTS = 4096  # 32 MiB of the largest metadata segments are 512

# A marker other than a restart, stuffed zero or fill byte. One 0xFF only: a pattern that eats runs of them
# would take quadratic time on a file full of them.
_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")
_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = {0xC0, 0xC1}
_DECODABLE = _SEQUENTIAL | {0xC2}
_LENGTH_BYTES = 2
_PRECISION_BITS = 8


def read(data: bytes) -> Header:
    """Walk the file.

    Raises Permanent: corrupt_image, unsupported_format or too_many_scans; struct.error or IndexError where it
    ends too early.
    """
    header: Header | None = None
    components, sequential, scans = 0, False, 0
    for marker, body in _segments(data):
        if marker in _FRAMES:
            if header is not None:
                raise corrupt_image("it holds two frame headers")
            header, components = _frame(marker, data, body)
            sequential = marker in _SEQUENTIAL
        elif marker == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise too_many_scans(MAX_SCANS)
            if sequential and data[body] == components:
                break  # all components at once: the decoder stops after this scan, and so can we
    if header is None or not scans:
        raise corrupt_image("it ends before its pixels")
    return header


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Marker and start of the content of every segment, up to the end marker of the first picture."""
    position, seen = 2, 0
    while found := _MARKER.search(data, position):
        marker, position = found[1][0], found.end()
        seen += 1
        if seen > MAX_SEGMENTS:
            raise corrupt_image("it is cut into too many segments")
        if marker == _EOI:
            return
        if marker in {_SOI, _TEM}:
            continue
        (length,) = struct.unpack_from(">H", data, position)
        if length < _LENGTH_BYTES:
            raise corrupt_image("one of its segments has no length")
        yield marker, position + _LENGTH_BYTES
        position += length


def _frame(marker: int, data: bytes, body: int) -> tuple[Header, int]:
    precision, height, width, components = struct.unpack_from(">BHHB", data, body)
    if marker not in _DECODABLE or precision != _PRECISION_BITS or components not in {1, 3, 4}:
        raise unsupported_format("a JPEG of a rare coding process")
    return Header(width, height), components

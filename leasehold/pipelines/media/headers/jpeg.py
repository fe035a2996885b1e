"""Reads the size from the header of a JPEG file. Refuses a file that has too many scans, or uses a coding process that
the decoder does not support.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.refusals import corrupt_image, too_many_scans, unsupported_format

MAX_SCANS = 64  # encoders write about ten; each scan costs a pass over all coefficients
MAX_SEGMENTS = 4096  # a file of 32 MiB has 512 metadata segments of the largest size

# A marker: the byte 0xFF, and a byte that names the marker. Restart markers, stuffed zeroes and fill bytes do not
# match. The pattern begins with one 0xFF. If it allowed several, the search would take quadratic time on a file full of
# 0xFF.
_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")
_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01  # start and end of the image, start of a scan, temporary
_FRAME_HEADERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # without the tables (DHT, DAC) and a reserved marker
_SEQUENTIAL = {0xC0, 0xC1}  # baseline and extended
_DECODABLE = _SEQUENTIAL | {0xC2}  # 0xC2: progressive
_LENGTH_BYTES = 2  # a segment begins with its length, in two bytes; the length counts these two bytes, too
_PRECISION_BITS = 8  # the bits of a sample; the decoder supports no other number


def read(data: bytes) -> Header:
    """Read the header.

    Raises Permanent `corrupt_image`, `unsupported_format` or `too_many_scans`; struct.error or IndexError if the file
    ends too early.
    """
    header: Header | None = None
    components, is_sequential, scans = 0, False, 0
    for marker, content_at in _segments(data):
        if marker in _FRAME_HEADERS:
            if header is not None:
                raise corrupt_image("the file has two frame headers")
            header, components = _read_frame(marker, data, content_at)
            is_sequential = marker in _SEQUENTIAL
        elif marker == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise too_many_scans(MAX_SCANS)
            if is_sequential and data[content_at] == components:
                break  # the scan has all components, so the decoder stops after it, and the check can stop, too
    if header is None or not scans:
        raise corrupt_image("the file ends before its pixels")
    return header


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """The marker of each segment and the position of its content, up to the end of the first picture."""
    position, count = 2, 0  # the file begins with an SOI, in two bytes
    while match := _MARKER.search(data, position):
        marker, position = match[1][0], match.end()
        count += 1
        if count > MAX_SEGMENTS:
            raise corrupt_image("the file has too many segments")
        if marker == _EOI:
            return
        if marker in {_SOI, _TEM}:
            continue
        (length,) = struct.unpack_from(">H", data, position)
        if length < _LENGTH_BYTES:
            raise corrupt_image("a segment of the file has no length")
        yield marker, position + _LENGTH_BYTES
        position += length


def _read_frame(marker: int, data: bytes, content_at: int) -> tuple[Header, int]:
    """The header, and the number of colour components. Raises Permanent `unsupported_format`."""
    precision, height, width, components = struct.unpack_from(">BHHB", data, content_at)
    if marker not in _DECODABLE or precision != _PRECISION_BITS or components not in {1, 3, 4}:
        raise unsupported_format("JPEG of a rare coding process is not accepted")
    return Header(width, height), components

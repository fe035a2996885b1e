"""Checks a picture's size, type, area and number of frames before any decoder reads it. The `resize` step calls
`inspect`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leasehold.pipelines.media import heic_decoder
from leasehold.pipelines.media.headers import avif, bmp, gif, heic, jpeg, png, tiff, webp
from leasehold.pipelines.media.headers.header import Header
from leasehold.pipelines.media.kinds import HEAD_BYTES, HEIC, is_as_declared, sniff
from leasehold.pipelines.media.limits import PictureLimits
from leasehold.pipelines.media.refusals import (
    corrupt_image,
    empty_file,
    mislabelled,
    too_large,
    too_many_frames,
    too_many_pixels,
    unknown_format,
    unsupported_format,
)

#: Content type -> the function that reads the header of such a file.
_READERS: dict[str, Callable[[bytes], Header]] = {
    "image/jpeg": jpeg.read,
    "image/png": png.read,
    "image/gif": gif.read,
    "image/webp": webp.read,
    "image/avif": avif.read,
    "image/tiff": tiff.read,
    "image/bmp": bmp.read,
    "image/heic": heic.read,
}


@dataclass(frozen=True, slots=True)
class Original:
    """A file that a decoder may read, and its header, with which the decoded picture must agree."""

    data: bytes
    content_type: str
    header: Header


def inspect(path: Path, limits: PictureLimits, declared: str | None = None) -> Original:
    """Read the file. Refuse a file that must not reach a decoder. `declared`: the content type that the client named.

    Raises Permanent with one of the codes of refusals.py.
    """
    size = path.stat().st_size
    if size == 0:
        raise empty_file()
    if size > limits.max_bytes:
        raise too_large(size, limits.max_bytes)
    data = path.read_bytes()
    content_type = sniff(data[:HEAD_BYTES])
    if content_type is None:
        raise unknown_format()
    if declared is not None and not is_as_declared(declared, content_type):
        raise mislabelled(declared, content_type)
    if content_type in HEIC and not heic_decoder.load_decoder():
        raise unsupported_format("HEIC is not accepted, because no HEIC decoder is installed")
    header = _read_header(content_type, data)
    _check_limits(header, limits)
    return Original(data, content_type, header)


def _read_header(content_type: str, data: bytes) -> Header:
    try:
        return _READERS[content_type](data)
    except (struct.error, IndexError) as error:
        raise corrupt_image("the file ends inside its header") from error


def _check_limits(header: Header, limits: PictureLimits) -> None:
    if header.width == 0 or header.height == 0:
        raise corrupt_image("the picture has no area")
    if header.pixels > limits.max_pixels:
        raise too_many_pixels(header.pixels, limits.max_pixels)
    if header.frames > limits.max_frames:
        raise too_many_frames(header.frames, limits.max_frames)
    total = header.pixels * header.frames
    if header.frames > 1 and total > limits.max_total_pixels:
        raise too_many_pixels(total, limits.max_total_pixels)

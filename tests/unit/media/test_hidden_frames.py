"""A file cannot hide frames or sizes from the header check that its decoder would decode."""

from __future__ import annotations

import struct
from io import BytesIO
from itertools import product

import pytest
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from leasehold.domain.errors import Permanent
from leasehold.pipelines.media.decode import Picture
from leasehold.pipelines.media.headers import gif, png
from leasehold.pipelines.media.headers.header import Header
from tests import pictures
from tests.unit.media.conftest import RefusalOf

COMMENT, CONTROL, PLAIN_TEXT, APPLICATION = b"!\xfe", b"!\xf9", b"!\x01", b"!\xff"
LOOP = b"\x0bNETSCAPE2.0"
SIDE = 7000


def frame(width: int = 1, height: int = 1) -> bytes:
    """A frame of one pixel, in the last corner of a canvas of this size: the decoder enlarges the canvas."""
    return b"\x2c" + struct.pack("<HHHHB", width - 1, height - 1, 1, 1, 0) + b"\x02\x02\x44\x01\x00"


def gif_of(*parts: bytes) -> bytes:
    return b"GIF89a\1\0\1\0\0\0\0" + b"".join(parts) + b";"


def swallowed(frames: bytes) -> bytes:
    """A chain of one short block, then frames. A reader that ends the extension before the chain sees a comment in the
    block, and takes the frames for the comment's text.
    """
    return b"\x03" + COMMENT + bytes([1 + len(frames)]) + b"\0" + frames + b"\0"


@pytest.mark.parametrize(
    "extension",
    [PLAIN_TEXT + b"\0", CONTROL + b"\0", APPLICATION + b"\0", b"!\x77\0", APPLICATION + LOOP + b"\0"],
    ids=["plain text", "control", "application", "unknown", "loop"],
)
def test_frames_behind_an_empty_block_count(refusal_of: RefusalOf, extension: bytes) -> None:
    """The decoder reads one more chain behind an empty block, where the standard ends the extension."""
    data = gif_of(extension, swallowed(frame(SIDE, SIDE) * 2), frame())
    header = gif.read(data)
    with Image.open(BytesIO(data)) as image:
        assert isinstance(image, GifImageFile)
        assert image.n_frames == header.frames == 3
    assert (header.width, header.height) == (SIDE, SIDE)
    assert refusal_of(data, limits={"max_pixels": SIDE * SIDE - 1}) == "too_many_pixels"
    assert refusal_of(data, limits={"max_total_pixels": 3 * SIDE * SIDE - 1}) == "too_many_pixels"


_EXTENSIONS = list(
    product(
        (COMMENT, CONTROL, PLAIN_TEXT, APPLICATION),
        (b"\0", b"\x04\0\0\0\0", LOOP, b"\x0bANIMEXTS1.0"),
        (b"", b"\0", b"\x03\1\0\0\0", b"\0\0"),
        (0, 1),
    )
)


@pytest.mark.parametrize(("label", "first", "others", "frames_before"), _EXTENSIONS)
def test_no_extension_hides_a_frame(label: bytes, first: bytes, others: bytes, frames_before: int) -> None:
    """The header check and the decoder find the same frames behind each extension."""
    data = gif_of(frame() * frames_before, label, first, others, swallowed(frame(9, 8) * 2), frame(3, 2))
    header = gif.read(data)
    with Image.open(BytesIO(data)) as image:
        assert isinstance(image, GifImageFile)
        assert header.frames == image.n_frames
        sizes = []
        for number in range(image.n_frames):
            image.seek(number)
            sizes.append(image.size)
    assert (header.width, header.height) == max(sizes)


def test_a_frame_that_is_larger_than_the_header_is_refused_before_it_is_decoded() -> None:
    data = gif_of(frame(), frame(40, 30))
    picture = Picture(data, "image/gif", Header(1, 1, 2))
    picture.frame(0)
    with pytest.raises(Permanent, match="disagree"):
        picture.frame(1)
    assert Picture(data, "image/gif", Header(40, 30, 2)).frame(1)[0].size == (1, 1)


def test_a_png_has_one_header() -> None:
    second = pictures.png_chunk(b"IHDR", struct.pack(">II5B", 9, 9, 8, 0, 0, 0, 0))
    data = pictures.png(4, 4, 8, 0, b"\0\0\0\0\0" * 4, second)
    with pytest.raises(Permanent, match="two headers"):
        png.read(data)

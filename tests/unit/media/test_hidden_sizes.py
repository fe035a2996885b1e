"""A picture inside a picture's file cannot be larger than the header check read: no decoder makes more of it.

Each case declares 16x16 and contains 4000x3000.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from leasehold.domain.errors import Permanent
from leasehold.pipelines.media.decode import Picture
from leasehold.pipelines.media.inspection import _read_header
from tests import pictures

SMALL, LARGE = (16, 16), (4000, 3000)


def encoded(size: tuple[int, int], kind: str, **options: object) -> bytes:
    return pictures.encoded(Image.new("L", size, 9), kind, **options)


# --- WebP


def riff(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) & 1)


def less_one(size: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<I", side - 1)[:3] for side in size)


def stream(size: tuple[int, int], *, lossless: bool) -> bytes:
    """The whole chunk."""
    data = encoded(size, "WEBP", lossless=lossless, method=0)
    return data[data.index(b"VP8L" if lossless else b"VP8 ") :]


def webp_frames(inner: bytes) -> bytes:
    frame = chunk(b"ANMF", bytes(6) + less_one(SMALL) + bytes(4) + inner)
    return riff(chunk(b"VP8X", b"\2\0\0\0" + less_one(SMALL)), chunk(b"ANIM", bytes(6)), frame, frame)


def webp_canvas(inner: bytes) -> bytes:
    return riff(chunk(b"VP8X", bytes(4) + less_one(SMALL)), inner)


# --- PNG


def apng(first: tuple[int, int], second: tuple[int, int]) -> bytes:
    def control(number: int, size: tuple[int, int]) -> bytes:
        return pictures.png_chunk(b"fcTL", struct.pack(">5I2H2B", number, *size, 0, 0, 1, 10, 0, 0))

    def rows(size: tuple[int, int]) -> bytes:
        return zlib.compress(bytes((1 + size[0]) * size[1]))

    header = pictures.png_chunk(b"IHDR", struct.pack(">II5B", *SMALL, 8, 0, 0, 0, 0))
    chunks = [
        header,
        pictures.png_chunk(b"acTL", struct.pack(">II", 2, 0)),
        control(0, first),
        pictures.png_chunk(b"IDAT", rows(first)),
        control(1, second),
        pictures.png_chunk(b"fdAT", struct.pack(">I", 2) + rows(second)),
        pictures.png_chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


# --- TIFF


def tiff(compression: int, data: bytes, *, rows: int = SMALL[1], further: bytes = b"") -> bytes:
    """One strip. `further`: the next directory."""
    fields = {256: SMALL[0], 257: SMALL[1], 258: 8, 259: compression, 262: 1, 273: 8, 277: 1, 278: rows, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    directory = struct.pack("<H", len(fields)) + entries
    start = 8 + len(data)
    following = start + len(directory) + 4 if further else 0
    return b"II*\0" + struct.pack("<I", start) + data + directory + struct.pack("<I", following) + further


def large_page() -> bytes:
    fields = {256: LARGE[0], 257: LARGE[1], 258: 8, 259: 8, 262: 1, 273: 8, 277: 1, 278: LARGE[1], 279: 20}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    return struct.pack("<H", len(fields)) + entries + bytes(4)


# --- JPEG and GIF


def second_frame_header(kind: int) -> bytes:
    return bytes([0xFF, kind]) + struct.pack(">HBHHB", 11, 8, LARGE[1], LARGE[0], 1) + b"\1\x11\0"


def jpeg_twice(*, progressive: bool) -> bytes:
    """A second frame header and the scans again, behind the first scans."""
    data = encoded(SMALL, "JPEG", progressive=progressive)
    scans = data[data.index(b"\xff\xda") :]
    return data[:-2] + second_frame_header(0xC2 if progressive else 0xC0) + scans


def jpeg_of_two() -> bytes:
    """Cameras append further pictures, which a directory in the first one names."""
    return pictures.encoded(Image.new("L", SMALL), "MPO", save_all=True, append_images=[Image.new("L", LARGE)])


def gif_of_more_pixels() -> bytes:
    data = bytearray(encoded(LARGE, "GIF"))
    struct.pack_into("<HH", data, 6, *SMALL)
    struct.pack_into("<HH", data, data.index(b"\x2c") + 5, *SMALL)
    return bytes(data)


CASES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "webp: a lossy stream of the canvas": ("image/webp", lambda: webp_canvas(stream(LARGE, lossless=False))),
    "webp: a lossless stream of the canvas": ("image/webp", lambda: webp_canvas(stream(LARGE, lossless=True))),
    "webp: a lossy stream of a frame": ("image/webp", lambda: webp_frames(stream(LARGE, lossless=False))),
    "webp: a lossless stream of a frame": ("image/webp", lambda: webp_frames(stream(LARGE, lossless=True))),
    "webp: a second stream of a frame": (
        "image/webp",
        lambda: webp_frames(stream(SMALL, lossless=False) + stream(LARGE, lossless=False)),
    ),
    "webp: behind the file": ("image/webp", lambda: riff(stream(SMALL, lossless=True)) + stream(LARGE, lossless=True)),
    "png: the first frame": ("image/png", lambda: apng(LARGE, SMALL)),
    "png: a later frame": ("image/png", lambda: apng(SMALL, LARGE)),
    "png: more rows than declared": ("image/png", lambda: pictures.png(*SMALL, 8, 0, bytes(LARGE[0] * LARGE[1]))),
    "tiff: a coded JPEG": ("image/tiff", lambda: tiff(7, encoded(LARGE, "JPEG"))),
    "tiff: more rows in a strip": (
        "image/tiff",
        lambda: tiff(8, zlib.compress(bytes(LARGE[0] * LARGE[1])), rows=2**30),
    ),
    "tiff: a later page": ("image/tiff", lambda: tiff(8, zlib.compress(bytes(256)), further=large_page())),
    "jpeg: a second header": ("image/jpeg", lambda: jpeg_twice(progressive=False)),
    "jpeg: a second progressive header": ("image/jpeg", lambda: jpeg_twice(progressive=True)),
    "jpeg: a second picture": ("image/jpeg", jpeg_of_two),
    "gif: more pixels than declared": ("image/gif", gif_of_more_pixels),
}  # fmt: skip


#: The other cases are refused. Here the decoder ignores what is larger.
IGNORED = {
    "webp: behind the file",
    "png: more rows than declared",
    "tiff: more rows in a strip",
    "tiff: a later page",
    "jpeg: a second picture",
    "gif: more pixels than declared",
}


def frames_of(name: str) -> list[tuple[int, int]]:
    content_type, make = CASES[name]
    data = make()
    picture = Picture(data, content_type, _read_header(content_type, data))
    return [picture.frame(index)[0].size for index in range(picture.frames)]


@pytest.mark.parametrize("name", [name for name in CASES if name not in IGNORED])
def test_a_stream_that_is_larger_than_its_frame_is_refused(name: str) -> None:
    with pytest.raises(Permanent) as refused:
        frames_of(name)
    assert refused.value.code == "corrupt_image"


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_is_larger_behind_the_picture_is_ignored(name: str) -> None:
    assert frames_of(name) == [SMALL]
